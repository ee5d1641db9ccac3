"""Headway behind Hugging Face transformers: a small Llama-style model writes the same tokens as with eager."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headway.torch

headway.torch.register_with_transformers()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.tensor([[5, 17, 42, 99, 3]])

written = {}
for implementation in ("eager", "headway"):
    model.set_attn_implementation(implementation)
    tokens = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    written[implementation] = tokens[0, prompt.shape[1] :].tolist()
    print(f"{implementation:8}", *written[implementation])
print("the same tokens:", written["eager"] == written["headway"])
