"""The mapper that handoff_torch.py saved, used by mlx-lm: the artifact does not know which framework made it."""

import mlx_lm

import crosskv
from crosskv import family

source, tokenizer = family.load("S", backend="mlx")
target, _ = family.load("M", backend="mlx")
ids = tokenizer.encode("The old man looked at the sea for a long time before he spoke.")
h = crosskv.handoff(crosskv.load("out/S-M"), source, target, ids)
print(mlx_lm.generate(target, tokenizer, h.tokens[0].tolist(), max_tokens=32, prompt_cache=h.cache))
