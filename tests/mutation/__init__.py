"""What `tests/mutants.py` is made of: which mistakes there are, which tests reach them, and trials of both.

- `places.py`: the mistakes, as changes of source text with keys that outlive moved lines.
- `recording.py`, `recorder.py`, `reached.py`: which tests reach which statement, recorded once.
- `static.py`: what ruff says before any test, and mypy after the first ones.
- `trials.py`, `view.py`: some tests beside one mistake, in a fork that sees its own copy of the repository.
- `command.py`: draws mistakes, orders their tests, and judges.

Two kept libraries were looked at. mutmut 3 puts all mutants of a function behind a trampoline: the source of the
package differs then, which tests here read, eject and compile; code outside of functions (rows of arguments, tables)
and decorated functions stay as they are. cosmic-ray changes a file on the disk and runs one command for each mutant:
no map of tests, and ten seconds of imports each. Neither knows of Pythons that tests start as forks of a warm
process, which has to import the mistake too.
"""
