"""Learners that do what learners may: odd models, odd gradients, odd loops. See `programs` for how they are run."""

from __future__ import annotations
