"""A tiny language model behind the OpenAI-compatible server of transformers, its weights and tokeniser made up here."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.servers import Installed, Running, free_ports, polythrottle, running, shown

from polythrottle.domain.errors import InvalidInput, TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Concurrent
from polythrottle.workloads import open_workload

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

CODE = """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
words = ["<unk>", "<s>", "</s>", "user", "assistant", ":", *(f"w{i}" for i in range(250))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
)
fast.chat_template = "{% for each in messages %}{{ each['role'] }} : {{ each['content'] }} {% endfor %}assistant :"
fast.save_pretrained("tiny")
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config = LlamaConfig(vocab_size=len(words), max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, **sizes)
model = LlamaForCausalLM(config)
with torch.no_grad():
    model.lm_head.weight[:6] = 0  # what it generates are words, never the end
model.generation_config.eos_token_id = None
model.save_pretrained("tiny")
"""
ALONE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture(scope="module")
def server(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Make the model and serve it."""
    folder, (http,) = tmp_path_factory.mktemp("transformers"), free_ports(1)
    environment = {**ALONE, "HF_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"}
    making = [installed.program("python"), "-c", CODE]
    made = subprocess.run(making, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    program = [installed.program("python"), installed.program("transformers"), "serve", "tiny"]
    words = ("--device", "cpu", "--host", "127.0.0.1", "--port", str(http))
    with running([*program, *words], "/health", folder, environment, http) as found:
        yield found


def uri(server: Running, rest: str) -> str:
    """Return where the model is."""
    return f"openai://127.0.0.1:{server.http}/{rest}"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_and_their_times_are_told(server: Running, endpoint: str) -> None:
    """The server counts; the first token comes before the last."""
    workload = open_workload(uri(server, f"tiny?endpoint={endpoint}&prompt_tokens=30&max_tokens=300"))
    query = workload.query()
    workload.close()
    assert query.tokens == 300
    assert query.first_s is not None
    assert query.per_token_s is not None
    assert 0 < query.first_s < query.latency_s


def test_several_answers_are_under_way_at_once(server: Running) -> None:
    """Each has all its tokens."""
    workload = open_workload(uri(server, "tiny?max_tokens=8&concurrency=4"))
    assert isinstance(workload, Concurrent)

    async def four() -> list[Query]:
        queries = await asyncio.gather(*[workload.send() for _ in range(4)])
        await workload.hang_up()
        return queries

    assert [query.tokens for query in asyncio.run(four())] == [8, 8, 8, 8]
    workload.close()


def test_a_wrong_model_is_refused_in_the_words_of_the_server(server: Running) -> None:
    """It lists no models, so none can be named."""
    with pytest.raises(InvalidInput, match="pinned to 'tiny'"):
        open_workload(uri(server, "tony"))


def test_a_slow_answer_is_given_up(server: Running) -> None:
    """After the timeout, in one line; the server is there for the next."""
    workload = open_workload(uri(server, "tiny?prompt_tokens=8&max_tokens=4000"), timeout_s=2.0)
    with pytest.raises(TrialError, match="did not answer within 2 s"):
        workload.query()
    workload.close()
    workload = open_workload(uri(server, "tiny?max_tokens=4"))
    assert workload.query().tokens == 4
    workload.close()


def test_measure_and_tune_from_the_command_line(server: Running, tmp_path: Path) -> None:
    """Tokens per joule and the times of tokens are measured, and bound by an SLO."""
    words = ("--device", "cpu", "--queries", "10", "--seconds", "0.5", "--workload")
    measured = polythrottle(tmp_path, "measure", *words, uri(server, "tiny?max_tokens=8"))
    assert measured["queries"] >= 10
    # Long answers: of a short one all tokens may lie in one read of a busy machine, which leaves tpot unknown.
    slo = ("--slo", "ttft_p99<=60s", "--slo", "tpot_p99<=10s", "--yes")
    tuned = polythrottle(
        tmp_path, "tune", *words, uri(server, "tiny?max_tokens=100&concurrency=1,3"), *slo, "--trials", "2"
    )
    assert tuned["best"]["point"]["concurrency"] in (1, 3)
    assert all(limit["holds"] and limit["best"] > 0 for limit in tuned["slo"])


def test_what_the_readme_shows_works(server: Running, tmp_path: Path) -> None:
    """At this server's address, and in two trials."""
    # The bound on requests in flight is a knob of the proxy; test_llama_cpp.py puts one before a server.
    commands = [words for words in shown("openai", uri(server, "tiny")) if "in_flight=" not in " ".join(words)]
    assert len(commands) == 2
    for words in commands:
        found = polythrottle(tmp_path, *words, *(["--trials", "2", "--yes"] if words[0] == "tune" else []))
        assert found["workload"].startswith(uri(server, "tiny?"))
