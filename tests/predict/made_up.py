"""A calibration that was never measured: round numbers."""

from __future__ import annotations

from offbeat.predict.calibration import Calibration, Layer, Probe, Timed

TIMES = tuple(0.009 + 0.0001 * number for number in range(21))  # 10 ms on average
MADE_UP = Calibration(
    recipe="made-up",
    batch=32,
    size_bytes=4_000_000,
    machine={"cores": 2, "load": 0.0, "processor": "of paper"},
    settings={"model": "mlp"},
    probes=(
        Probe("ring", 1, 0.011, TIMES, 0.0, 0.001),
        Probe("ring", 2, 0.014, tuple(1.1 * time for time in TIMES), 0.002, 0.001),
        Probe("ring", 4, 0.026, TIMES, 0.004, 0.001),
        Probe("async", 1, 0.013, TIMES, 0.0015, 0.0015),
        Probe("async", 4, 0.0065, TIMES, 0.006, 0.006),
    ),
    layers=(Layer("0", 0.001, 0.002, 1_000_000), Layer("2", 0.001, 0.004, 3_000_000)),
    batches=((16, 0.006), (32, 0.010), (64, 0.018)),
    reductions=(Timed(2, 1000, 2e-4 + 1e-6), Timed(2, 1_000_000, 2e-4 + 1e-3), Timed(4, 1_000_000, 6e-4 + 1.5e-3)),
    pushes=(Timed(1, 40_000, 0.001),),
    copy_alone_bytes_per_s=1e10,
)
