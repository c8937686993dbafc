"""llama.cpp's own server, built from the sources in llama-cpp-python's archive, and a tiny model that is made here."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from services.servers import FOLDER

VERSION = "0.3.36"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
HOME = FOLDER / "llama"
SOURCES = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
# The server alone, for any processor of this kind, without the page for browsers, TLS and what needs other libraries.
OFF = (
    "BUILD_SHARED_LIBS",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL",
    "LLAMA_ALL_WARNINGS",
    "GGML_OPENMP",
    "GGML_LLAMAFILE",
    "GGML_NATIVE",
)
MODEL = """
import sys

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, INNER = 2, 64, 4, 128
random = np.random.default_rng(0)
special = ["<unk>", "<s>", "</s>"]
tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"\\u2581w{i}" for i in range(250))]
kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))

writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_name("tiny")
writer.add_context_length(4096)
writer.add_embedding_length(WIDTH)
writer.add_block_count(LAYERS)
writer.add_feed_forward_length(INNER)
writer.add_head_count(HEADS)
writer.add_head_count_kv(HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(WIDTH // HEADS)
writer.add_vocab_size(len(tokens))
writer.add_file_type(gguf.LlamaFileType.ALL_F32)
writer.add_tokenizer_model("llama")
writer.add_token_list(tokens)
writer.add_token_scores([float(-i) for i in range(len(tokens))])
writer.add_token_types(kinds)
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_unk_token_id(0)


def add(name, *shape):
    writer.add_tensor(name, (random.standard_normal(shape) * 0.1).astype(np.float32))


add("token_embd.weight", len(tokens), WIDTH)
add("output.weight", len(tokens), WIDTH)
writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
for layer in range(LAYERS):
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
    add(f"blk.{layer}.ffn_gate.weight", INNER, WIDTH)
    add(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
    add(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def server() -> Path:
    """Return the server's program, built unless it is there already."""
    program = HOME / f"llama-server-{VERSION}"
    if not program.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}", "--dest", str(HOME)])
        _run(["tar", "-xzf", str(HOME / ARCHIVE), "-C", str(HOME), SOURCES])
        built = HOME / "build"
        flags = [f"-D{name}=OFF" for name in OFF]
        kind = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        _run(["cmake", "-S", str(HOME / SOURCES), "-B", str(built), *kind, *flags])
        _run(["cmake", "--build", str(built), "--target", "llama-server", "--parallel", f"{os.cpu_count()}"])
        shutil.copy(built / "bin" / "llama-server", program)
        for left in (built, HOME / SOURCES.partition("/")[0]):
            shutil.rmtree(left)
        (HOME / ARCHIVE).unlink()
    return program


def model() -> Path:
    """Return a file with a tiny model, its weights and its tokens made up."""
    path = HOME / f"tiny-{hashlib.sha256(MODEL.encode()).hexdigest()[:12]}.gguf"
    if not path.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        python = HOME / "venv" / "bin" / "python"
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(HOME / "venv")])
            _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "gguf==0.19.0"])
        _run([str(python), "-c", MODEL, str(path)])
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command[:8])}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
