"""What policies cost in quality: one policy on real servers, or a suite for many and their peers.

``--policy P`` serves P's points beside the full cache and baselines (``quality_served``);
``--policies A,B`` and ``--url`` judge a suite of tasks at equal budgets (``quality_suite``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from loadtest import quality_setup
from loadtest.errors import UserError
from loadtest.quality_suite import options

__all__ = ["add_arguments", "run"]

SERVED, SUITE = "--policy", "--policies"
_FORMS: dict[str, tuple[str, Callable[[argparse._ActionsContainer], None]]] = {
    SERVED: ("one policy, served (--policy)", quality_setup.add_arguments),
    SUITE: ("a suite of tasks (--policies, --peers, --url)", options.add_arguments),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest quality``: shared ones, and a group for each form."""
    quality_setup.add_shared_arguments(parser)
    defaults: dict[str, dict[str, object]] = {}
    for form, (title, add) in _FORMS.items():
        group = parser.add_argument_group(title)
        add(group)
        defaults[form] = {action.dest: action.default for action in group._group_actions}
        for action in group._group_actions:
            action.help = action.help.replace("%(default)s", str(action.default))
            action.default = argparse.SUPPRESS  # so that a form can tell what was not for it
    parser.set_defaults(form_defaults=defaults)


def run(args: argparse.Namespace) -> int:
    """Run the form asked for. Raises UserError as it does, or for flags of both forms."""
    form = _form(args)
    if form == SERVED:
        from loadtest.quality_served import run_served

        return run_served(args)
    from loadtest.quality_suite.command import run_suite  # loads torch

    return run_suite(args)


def _form(args: argparse.Namespace) -> str:
    """The form whose flags were given; the defaults of its others are filled in."""
    given = {form: known.keys() & vars(args).keys() for form, known in args.form_defaults.items()}
    form = SERVED if "policy" in given[SERVED] or not given[SUITE] else SUITE
    for other, names in given.items():
        if other != form and names:
            flag = f"--{min(names).replace('_', '-')}"
            raise UserError(
                f"{flag} goes with {_FORMS[other][0]}, {form} was given: leave one of them out"
                if form == SERVED
                else f"{flag} goes with {_FORMS[other][0]}: give {SERVED}, or leave it out"
            )
    if form == SERVED and "policy" not in given[SERVED]:
        raise UserError(
            "give --policy P (its points on real servers) or --policies A,B (a suite of tasks, "
            "beside peers)"
        )
    for name, value in args.form_defaults[form].items():
        if name not in vars(args):
            setattr(args, name, value)
    return form
