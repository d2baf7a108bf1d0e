"""Strategies in simulated time, by the policies and schedules that run for real. No torch."""
