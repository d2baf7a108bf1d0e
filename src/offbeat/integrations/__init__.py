"""Other people's trainers as learners of a parameter server: Lightning, Hugging Face's Trainer, Accelerate.

Each is a module of its own and needs its package: `offbeat.integrations.lightning`, `.transformers`, `.accelerate`. The
script is started by `offbeat run --learners 4 --sync k-async:2 script.py`; any line of `offbeat strategies` will do.
"""
