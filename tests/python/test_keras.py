"""headway.keras against Keras itself, on each backend that is installed; a backend is chosen once a process."""

import importlib.util
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)

PROGRAM = """
import keras, numpy as np, headway.keras
assert keras.backend.backend() == BACKEND

rng = np.random.default_rng(0)
x, y = rng.standard_normal((2, 6, 16), np.float32), rng.standard_normal((2, 9, 16), np.float32)
mask = rng.random((2, 6, 9)) < 0.7
mask[:, :, 0] = True
numpy = keras.ops.convert_to_numpy

wide = {"value_dim": 3} if BACKEND == "torch" else {}  # what Keras's own attention takes elsewhere is one width
for options in ({}, {"use_bias": False, **wide}, {"output_shape": 5}, {"dropout": 0.4}):
    original = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, **options)
    ours = headway.keras.MultiHeadAttention.from_config(original.get_config())
    original(x, y), ours(x, y)
    ours.set_weights(original.get_weights())
    for how in ({}, {"attention_mask": mask}, {"use_causal_mask": True}, {"return_attention_scores": True},
                {"attention_mask": mask, "use_causal_mask": True, "return_attention_scores": True}):
        expected, found = original(x, y, **how), ours(x, y, **how)
        for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (expected, found))):
            np.testing.assert_allclose(numpy(b), numpy(a), atol=2e-6, rtol=1e-4)

# Dropout is drawn from the layer's own generator, and acts in training only.
outs = []
for _ in range(2):
    layer = headway.keras.MultiHeadAttention(num_heads=2, key_dim=8, dropout=0.5, seed=7)
    layer(x, x)
    layer.set_weights([np.ones_like(weight) / 8 for weight in layer.get_weights()])
    outs.append([numpy(layer(x, x, training=training)) for training in (True, True, False)])
np.testing.assert_array_equal(outs[0][0], outs[1][0])
assert not np.array_equal(outs[0][0], outs[0][1]) and not np.array_equal(outs[0][0], outs[0][2])

# A model that trains, is saved and comes back.
if BACKEND != "numpy":
    inputs = keras.Input((6, 16))
    attended = headway.keras.MultiHeadAttention(num_heads=2, key_dim=8)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, attended)
    model.compile("adam", "mse")
    before = model.evaluate(x, np.zeros_like(x), verbose=0)
    model.fit(x, np.zeros_like(x), epochs=5, verbose=0)
    assert model.evaluate(x, np.zeros_like(x), verbose=0) < before
    model.save("model.keras")
    again = keras.saving.load_model("model.keras")
    np.testing.assert_array_equal(numpy(again(x)), numpy(model(x)))
import doctest
for item in (headway.keras, headway.keras.MultiHeadAttention):
    example = doctest.DocTestParser().get_doctest(item.__doc__, {}, item.__name__, None, 0)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0
print("good")
"""


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_a_keras_layer_is_the_original_on_each_backend(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = {**os.environ, "KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BACKEND", repr(backend))],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.stdout.endswith("good\n"), run.stderr
