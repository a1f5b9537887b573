"""Recipes: found, or refused with the cure; imported and run as ``python file.py`` would."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autoaccum.cli.app import main
from autoaccum.errors import RecipeNotFoundError, RecipeResultError
from autoaccum.training.recipes import RecipeRaised, opened

GOOD = "def recipe():\n    return {'model': 1, 'data': 2}\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "job.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def refusal(recipe: str, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught, opened(recipe):
        pass
    assert main(["probe", recipe]) == 2  # and that is a matter of usage
    return str(caught.value)


def test_the_function_is_recipe_unless_another_is_named(write: Callable[..., str]) -> None:
    path = write(GOOD + "def other():\n    return {'model': 3, 'data': 4, 'lr': 0.1}\n")
    with opened(path) as arguments:
        assert arguments == {"model": 1, "data": 2}
    with opened(f"{path}:other") as arguments:
        assert arguments == {"model": 3, "data": 4, "lr": 0.1}


def test_a_module_is_found_from_the_working_directory(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(GOOD, "some_jobs/first.py")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with opened("some_jobs.first:recipe") as arguments:
        assert arguments == {"model": 1, "data": 2}
    assert sys.path == before


def test_a_path_may_hold_a_colon(write: Callable[..., str]) -> None:
    with opened(write(GOOD, "a:b/job.py")) as arguments:
        assert arguments == {"model": 1, "data": 2}


def test_a_missing_file_is_refused_with_the_closest_one(write: Callable[..., str]) -> None:
    path = write(GOOD)
    message = refusal(path.replace("job", "jobs"), RecipeNotFoundError)
    assert "jobs.py" in message
    assert f"Did you mean {path!r}?" in message
    assert "path/to/file.py[:function]" in message
    assert str(Path("nowhere", "job.py").resolve()) in refusal("nowhere/job.py:train", RecipeNotFoundError)
    assert "no recipe file" in refusal(str(Path(path).parent), RecipeNotFoundError)


@pytest.mark.parametrize("module", ["no_such_module", "json.no_such_module", "no_such.module:train", "", ".x", "a..b"])
def test_a_missing_module_is_refused(module: str) -> None:
    message = refusal(module, RecipeNotFoundError)
    assert f"no recipe module {module.partition(':')[0]!r}" in message
    assert "package.module[:function]" in message


def test_a_missing_function_is_refused_with_those_there_are(write: Callable[..., str]) -> None:
    path = write("from os.path import join\ndef train_small(): ...\ndef train_large(): ...\ndef _helper(): ...\n")
    message = refusal(f"{path}:train_smal", RecipeNotFoundError)
    assert "Its functions: train_small, train_large." in message
    assert "Did you mean 'train_small'?" in message
    assert f"{path} has no function 'recipe'. Its functions: " in refusal(path, RecipeNotFoundError)
    assert f" Pass {path}:FUNCTION." in message


def test_something_that_is_no_function_is_refused(write: Callable[..., str]) -> None:
    message = refusal(write("recipe = {'model': 1, 'data': 2}\n"), RecipeNotFoundError)
    assert "it is a dict" in message
    assert "it is an int" in refusal(write("recipe = 3\n"), RecipeNotFoundError)
    path = write("x = 3\n")
    assert refusal(path, RecipeNotFoundError) == (
        f"{path} has no function 'recipe'. Define one that returns the arguments of fit: "
        'def recipe(): return {"model": model, "data": data, "loss_fn": loss_fn}'
    )


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned NoneType, expected a dict"),
        ("[1]", "returned list, expected a dict"),
        ("{'data': 2}", "no 'model'"),
        ("{'model': 1}", "no 'data'"),
        ("{'model': 1, 'data': 2, 'clip_nrm': 1.0}", "fit() has no argument 'clip_nrm'. Did you mean 'clip_norm'?"),
        ("{'model': 1, 'data': 2, 'learning_rate': 0.1}", "fit() has no argument 'learning_rate'. Use lr."),
        ("{'model': 1, 'data': 2, 3: 4}", "returned 3, but fit() has no argument 3. It has model, data, "),
    ],
)
def test_a_result_that_fit_cannot_take_is_refused(returned: str, said: str, write: Callable[..., str]) -> None:
    path = write(f"def recipe():\n    return {returned}\n")
    message = refusal(path, RecipeResultError)
    assert said in message
    assert f"{path}:recipe" in message


@pytest.mark.parametrize(
    ("text", "last_line", "kind"),
    [
        ("import no_such_module\n", 1, ModuleNotFoundError),
        ("import job\nimport job.deeper\n", 2, ModuleNotFoundError),
        ("def recipe(): \n    raise KeyError('x')\n", 2, KeyError),
        ("raise RuntimeError\n", 1, RuntimeError),
        ("def recipe(:\n", None, SyntaxError),
    ],
)
@pytest.mark.parametrize("as_module", [False, True])
def test_what_the_recipe_raises_keeps_the_recipes_frames_only(
    text: str,
    last_line: int | None,
    kind: type[Exception],
    as_module: bool,
    write: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(text)
    monkeypatch.chdir(Path(path).parent)
    sys.modules.pop("job", None)
    with pytest.raises(RecipeRaised) as caught, opened("job" if as_module else path):
        pass
    sys.modules.pop("job", None)
    error = caught.value.__cause__
    assert isinstance(error, kind)
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    assert frames[:1] == ([] if last_line is None else [(path, last_line)])


def test_its_folder_is_on_the_path_as_long_as_the_recipe_is_in_use(write: Callable[..., str]) -> None:
    write("value = 5\n", "beside_the_recipe.py")
    write("value = 6\n", "beside_the_recipe_too.py")
    path = write(
        "from beside_the_recipe import value\n"
        "def late():\n    import beside_the_recipe_too\n    return beside_the_recipe_too.value\n"
        "def recipe():\n    return {'model': value, 'data': late}\n"
    )
    before = list(sys.path)
    with opened(path) as arguments:
        assert arguments["model"] == 5
        assert arguments["data"]() == 6
    assert sys.path == before
    with pytest.raises(RecipeRaised), opened(write("1 / 0")):
        pass
    assert sys.path == before


def test_what_stands_beside_it_comes_before_what_is_on_the_path(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("value = 5\n", "of_two_folders.py")
    write("value = 6\n", "elsewhere/of_two_folders.py")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    with opened(write("from of_two_folders import value\n" + GOOD.replace("1", "value"))) as arguments:
        assert arguments["model"] == 5


def test_its_classes_can_be_pickled_under_the_files_name(write: Callable[..., str]) -> None:
    path = write("class Data: ...\ndef recipe():\n    return {'model': Data, 'data': 2}\n")
    with opened(path) as arguments:
        assert arguments["model"].__module__ == "job"
        assert sys.modules["job"].Data is arguments["model"]
    assert "job" not in sys.modules


def test_a_file_that_bears_the_name_of_a_module_leaves_that_module_alone(write: Callable[..., str]) -> None:
    path = write("class Data: ...\ndef recipe():\n    return {'model': Data, 'data': 2}\n", "sys.py")
    with opened(path) as arguments:
        assert sys.modules["sys"] is sys
        assert sys.modules[arguments["model"].__module__].Data is arguments["model"]


def test_worker_processes_read_a_dataset_of_the_recipes_own(write: Callable[..., str]) -> None:
    path = write(
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.ones(2), torch.ones(1)\n"
        "def recipe():\n"
        "    return {'model': torch.nn.Linear(2, 1), 'data': Rows(), 'loss_fn': torch.nn.functional.mse_loss}\n"
    )
    argv = ["fit", path, "--effective-batch", "4", "--num-workers", "1", "--device", "cpu", "--no-progress"]
    assert main(argv) == 0
