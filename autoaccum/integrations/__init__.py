"""Other libraries' trainers, whose windows are run here: each module needs its library, and the rest of autoaccum none."""  # noqa: E501
