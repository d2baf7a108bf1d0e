"""Settings of all tests: random tests draw the same examples everywhere, so that a red run can be repeated."""

from hypothesis import settings

settings.register_profile("offbeat", derandomize=True, deadline=None, database=None)
settings.load_profile("offbeat")
