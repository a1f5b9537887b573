"""The command line: what is typed becomes a call of the public interface, and its result becomes text or JSON."""
