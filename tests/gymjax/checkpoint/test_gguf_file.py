import gguf
import numpy as np
import pytest

from gymjax.checkpoint.gguf_file import GGUFFile, llama3_divisors, unpermute

HEADS, KV_HEADS, WIDTH, FFN, VOCAB = 4, 2, 32, 64, 96
LLAMA3 = {
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_tensors(seed=0, *, bias=False, qk_norm=False, head=False):
    rng = np.random.default_rng(seed)
    H = WIDTH // HEADS
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if head:
        shapes["output.weight"] = (VOCAB, WIDTH)
    rows = {"attn_q": WIDTH, "attn_k": KV_HEADS * H, "attn_v": KV_HEADS * H}
    for i in range(2):
        block = {name: (n, WIDTH) for name, n in rows.items()} | {"attn_output": (WIDTH, WIDTH)}
        block |= {"ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
        block |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        if qk_norm:
            block |= {"attn_q_norm": (H,), "attn_k_norm": (H,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        if bias:
            shapes |= {f"blk.{i}.{name}.bias": (n,) for name, n in rows.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def permute(w, heads):
    """llama.cpp's row order: half-split pairs (i, i + H/2) become neighbours."""
    half = w.shape[0] // heads // 2
    order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in range(2)]
    return w[order]


def write(path, architecture, tensors, *, quantized=None, numbers=(), texts=()):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in dict(numbers).items():
        writer.add_float32(key, value)
    for key, value in dict(texts).items():
        writer.add_string(key, value)
    for name, value in tensors.items():
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            value = permute(value, HEADS if ".attn_q." in name else KV_HEADS)
        if quantized and value.ndim == 2:
            value = gguf.quants.quantize(value, quantized)
            writer.add_tensor(name, value, raw_dtype=quantized)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unpermute_undoes_the_converter():
    w = np.arange(24 * 5).reshape(24, 5)
    np.testing.assert_array_equal(unpermute(permute(w, 3), 3), w)
    np.testing.assert_array_equal(unpermute(permute(w[:, 0], 3), 3), w[:, 0])


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"bias": True, "head": True}), ("qwen2", {"bias": True}), ("qwen3", {"qk_norm": True})],
)
def test_tensors_come_back_under_their_names(architecture, options, tmp_path):
    tensors = hf_tensors(**options)
    file = GGUFFile(write(tmp_path / "x.gguf", architecture, tensors))
    assert len(file.shapes) == len(tensors)
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    if options.get("bias"):
        pairs["model.layers.1.self_attn.q_proj.bias"] = "blk.1.attn_q.bias"
    for name, stored in pairs.items():
        np.testing.assert_array_equal(file.read(name), tensors[stored])
    assert file.config["tie_word_embeddings"] == (not options.get("head"))
    assert file.config["model_type"] == architecture
    assert file.config["rms_norm_eps"] == 1e-5
    assert file.config["head_dim"] == WIDTH // HEADS


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 5e-3), ("Q4_1", 0.1)])
def test_quantized_formats(kind, error, tmp_path):
    tensors = hf_tensors()
    path = write(tmp_path / "x.gguf", "llama", tensors, quantized=getattr(gguf.GGMLQuantizationType, kind))
    read = GGUFFile(path).read("model.layers.0.self_attn.q_proj.weight")
    # error: relative to the largest weight of a block, half a step of the format
    assert np.abs(read - tensors["blk.0.attn_q.weight"]).max() < error * np.abs(read).max()
    assert read.dtype == np.float32


def test_rope_settings(tmp_path):
    def rope(name, tensors=None, **options):
        return GGUFFile(write(tmp_path / name, "llama", tensors or hf_tensors(), **options)).config["rope_parameters"]

    assert rope("plain") == {"rope_type": "default", "rope_theta": 10000.0}
    assert rope("theta", numbers={"llama.rope.freq_base": 1e6}) == {"rope_type": "default", "rope_theta": 1e6}
    linear = {"numbers": {"llama.rope.scaling.factor": 4.0}, "texts": {"llama.rope.scaling.type": "linear"}}
    assert rope("linear", **linear) == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    divisors = llama3_divisors(LLAMA3, 8).astype(np.float32)
    assert divisors.min() == 1
    assert divisors.max() == pytest.approx(32)
    scaled = hf_tensors() | {"rope_freqs.weight": divisors}
    assert rope("llama3", scaled, numbers={"llama.rope.freq_base": 5e5}) == {"rope_type": "llama3", **LLAMA3}


def test_bad_rope_scaling(tmp_path):
    yarn = write(tmp_path / "x.gguf", "llama", hf_tensors(), texts={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ValueError, match=r"rope scaling 'yarn' is not supported"):
        GGUFFile(yarn)
    linear = write(tmp_path / "z.gguf", "llama", hf_tensors(), texts={"llama.rope.scaling.type": "linear"})
    with pytest.raises(ValueError, match=r"z\.gguf: linear rope scaling lacks its rope\.scaling\.factor"):
        GGUFFile(linear)
    odd = hf_tensors() | {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs are not those of Llama 3"):
        GGUFFile(write(tmp_path / "y.gguf", "llama", odd))


def test_bad_architecture(tmp_path):
    with pytest.raises(ValueError, match=r"architecture 'gemma' is not supported; supported: llama, qwen2, qwen3"):
        GGUFFile(write(tmp_path / "x.gguf", "gemma", hf_tensors()))


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_bad_file_cut_short(keep, tmp_path):
    path = write(tmp_path / "x.gguf", "llama", hf_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"x\.gguf is no GGUF file, cut short or damaged.*fetch it again"):
        GGUFFile(path)


def test_bad_file_without_embedding(tmp_path):
    tensors = hf_tensors()
    del tensors["token_embd.weight"]
    with pytest.raises(ValueError, match=r"the file lacks token_embd\.weight"):
        GGUFFile(write(tmp_path / "x.gguf", "llama", tensors))


def test_bad_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"give the path of a \.gguf file"):
        GGUFFile(tmp_path / "x.gguf")
