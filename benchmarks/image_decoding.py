"""How long a core decodes an image: processor time of data `images`, beside decoding at full size.

    python benchmarks/image_decoding.py [--size 224] [--repeats 30]

Images are smooth noise, JPEG quality 90. A GPU that trains N images a second needs N x the milliseconds / 1000 cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from offbeat.train.image_files import decode

SIDES = ((500, 375), (1000, 750), (2000, 1500))


def processor_ms(act: Callable[[], object], repeats: int) -> float:
    act()
    began_s = time.process_time()
    for _ in range(repeats):
        act()
    return 1000 * (time.process_time() - began_s) / repeats


def at_full_size(path: Path, size: int) -> Image.Image:
    with Image.open(path) as image:
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--size", type=int, default=224)
    words.add_argument("--repeats", type=int, default=30)
    given = words.parse_args()
    print(f"{'pixels':>12}  {'JPEG':>8}  {'JPEG at full size':>18}  {'PNG':>8}   processor ms an image")
    chance = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        jpeg, png = Path(folder) / "one.jpg", Path(folder) / "one.png"
        for width, height in SIDES:
            noise = Image.fromarray(chance.integers(0, 255, (height // 20, width // 20, 3), dtype=np.uint8))
            image = noise.resize((width, height), Image.Resampling.BICUBIC)
            image.save(jpeg, quality=90)
            image.save(png)
            acts = (
                lambda: decode(str(jpeg), given.size),
                lambda: at_full_size(jpeg, given.size),
                lambda: decode(str(png), given.size),
            )
            ours, plain, other = (processor_ms(act, given.repeats) for act in acts)
            print(f"{f'{width}x{height}':>12}  {ours:8.1f}  {plain:18.1f}  {other:8.1f}")


if __name__ == "__main__":
    main()
