"""How many examples a property is tried with: few in a usual run, the profile's number under a larger one."""

from hypothesis import settings

USUAL = settings.get_profile("default").max_examples


def examples(few):
    """For `max_examples`: this many, or thousands with --hypothesis-profile=nightly."""
    chosen = settings().max_examples
    return chosen if chosen > USUAL else few
