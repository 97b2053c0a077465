"""Make the section "Every event" of `docs/events_and_hooks.md` from the events' rows. `pages.py` writes it."""

from __future__ import annotations

import inspect
import re

from hf_compat.hf.callbacks import EVENTS, Event, TrainerCallback

_SECTION = re.compile(r"^## Every event\n.*?(?=^## )", flags=re.DOTALL | re.MULTILINE)
_HEAD = """## Every event

A callback's method is called with `args`, `state` and `control`. By keyword it gets the model, the optimizer, the
schedule, the loaders, and what the event gives. A method that names `trainer`, `loss`, `inputs` or `outputs` gets it.
`python tests/house/pages.py` makes this section from `hf_compat/hf/callbacks.py`.
"""


def with_events(page: str) -> str:
    """Write the page with today's events."""
    section = "\n".join([_HEAD, *map(_entry, EVENTS.values())])
    return _SECTION.sub(lambda _: f"{section}\n", page)


def _entry(event: Event) -> str:
    meaning = inspect.getdoc(getattr(TrainerCallback, event.name))
    facts = {"Lightning's hook": event.hooks, "flags cleared before": event.clears}
    facts["gives"] = () if event.gives is None else (event.gives,)
    facts["gives a method that names it"] = event.offers
    lines = [f"- **{fact}**: {', '.join(f'`{name}`' for name in names)}" for fact, names in facts.items() if names]
    return "\n".join([f"### `{event.name}`\n", f"{meaning}\n", *lines, *([""] if lines else [])])
