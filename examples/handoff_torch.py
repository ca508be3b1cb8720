"""A prompt read by S, continued by M: fit once, save, hand over. Runs in about a minute on two cores."""

import torch

import crosskv
from crosskv import family

source, tokenizer = family.load("S")
target, _ = family.load("M")
config = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=64, calib_seq_len=256, stride=1)
mapper = crosskv.fit(source, target, family.text("calibration"), tokenizer, config)
mapper.save("out/S-M")

ids = torch.tensor([tokenizer.encode("The old man looked at the sea for a long time before he spoke.")])
h = crosskv.handoff(crosskv.load("out/S-M"), source, target, ids)
out = target.generate(ids, cache=h.cache, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
print(tokenizer.decode(out[0], skip_special_tokens=True))
