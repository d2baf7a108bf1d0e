"""Predictions: calibration, replay, training in virtual time, races and advice."""
