"""Language models behind OpenAI-compatible servers that stream well and badly; a real one is in tests/services."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_servers import FakeServer, Handler, event, listening, openai, piece, stream, usage

from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    KnobRejected,
    PermissionDenied,
    TrialError,
    UnknownName,
)
from polythrottle.domain.ports import Concurrent, Noting, Workload
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import WorkloadContract
from polythrottle.workloads import open_workload
from polythrottle.workloads.services.openai import Events, TokenStream, made_up_prompts

CHAT, COMPLETIONS = ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")
DONE = b"data: [DONE]\n\n"
WHOLE = (piece("", None), piece("Hel"), piece("lo", "length"), usage(7), DONE)
KEY = "sk-very-secret"
Serve = Callable[..., FakeServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return what starts a server; it ends with the test."""
    with ExitStack() as stack:
        yield lambda *parts: stack.enter_context(listening(openai(*(parts or WHOLE))))


@contextmanager
def opened(server: FakeServer, options: str = "", **words: Any) -> Iterator[Workload]:
    """Open the workload ``org/m`` of a server and close it in the end."""
    workload = open_workload(f"openai://{server.where}/org/m{options}", **words)
    try:
        yield workload
    finally:
        workload.close()


def asked(server: FakeServer) -> list[dict[str, Any]]:
    """Return what the server was asked to go on from, the first try left out."""
    return [json.loads(body) for method, _, _, body in server.seen if method == "POST"][1:]


class TestOpenaiContract(WorkloadContract):
    """The contract of every workload, for a language model."""

    @pytest.fixture(autouse=True)
    def _serve(self, serve: Serve) -> None:
        self.server = serve()

    def make(self) -> Workload:
        """Return a model."""
        return open_workload(f"openai://{self.server.where}/org/m?concurrency=1,2")


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_a_chat_is_streamed_with_its_usage(serve: Serve) -> None:
    """One message of so many words, at temperature 0, and the server is asked to count."""
    server = serve()
    with opened(server, "?prompt_tokens=20&max_tokens=9") as workload:
        assert workload.query().prompt_tokens == 3  # as the server counts, which alone knows its tokens
    (found,) = asked(server)
    assert (found["model"], found["max_tokens"], found["temperature"], found["stream"]) == ("org/m", 9, 0, True)
    assert found["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in found
    (message,) = found["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 20


def test_completions_get_a_prompt(serve: Serve) -> None:
    """The other endpoint takes bare text, and fields some servers know are sent when asked for."""
    server = serve()
    with opened(server, "?endpoint=completions&ignore_eos=true") as workload:
        workload.query()
    (found,) = asked(server)
    assert isinstance(found["prompt"], str)
    assert found["ignore_eos"] is True
    assert server.seen[-1][1] == "/v1/completions"


def test_prompts_come_from_a_file_in_turn(serve: Serve, tmp_path: Path) -> None:
    """One a line, from the first to the last and again."""
    path, server = tmp_path / "prompts.txt", serve()
    path.write_text("What is energy?\n\nAnd power?\n")
    with opened(server, f"?prompts={path}") as workload:
        for _ in range(3):
            workload.query()
    told = [each["messages"][0]["content"] for each in asked(server)]
    assert told == ["What is energy?", "And power?", "What is energy?"]


def test_made_up_prompts_share_no_beginning() -> None:
    """Else a server that keeps prefixes would have less to do than it seems; they are the same every time."""
    first, second = made_up_prompts(50), made_up_prompts(50)
    texts = [next(first) for _ in range(20)]
    assert texts == [next(second) for _ in range(20)]
    assert len({text.split()[0] for text in texts}) == 20


# --- what is measured ------------------------------------------------------------------------------------------------


def test_tokens_are_those_the_server_counts(serve: Serve) -> None:
    """An answer is one item; its first token came before its last."""
    with opened(serve()) as workload:
        query = workload.query()
    assert (query.items, query.tokens) == (1, 7)
    assert query.first_s is not None
    assert 0 < query.first_s <= query.latency_s


def test_pieces_are_counted_where_the_server_does_not_count_and_that_is_noted(serve: Serve) -> None:
    """The note is there before anything is measured; a server that counts needs none."""
    with opened(serve(piece("a"), piece("b"), piece("c", "stop"), DONE)) as workload:
        assert isinstance(workload, Noting)
        assert workload.query().tokens == 3
        assert "does not say how many tokens" in workload.notes[0]
    with opened(serve()) as workload:
        assert isinstance(workload, Noting)
        assert workload.notes == ()


def test_times_are_those_of_the_pieces() -> None:
    """The first piece with text counts, not the one that only names the role; usage after the end changes no time."""
    found = TokenStream("m", 10.0)
    for now_s, data in (
        (10.5, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        (11.0, {"choices": [{"delta": {"content": "a"}}]}),
        (12.0, {"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]}),
        (15.0, {"choices": [], "usage": {"completion_tokens": 5}}),
    ):
        found.take(json.dumps(data).encode(), now_s)
    query = found.query()
    assert (query.first_s, query.latency_s, query.tokens, query.per_token_s) == (1.0, 2.0, 5, 0.25)


def test_an_answer_that_comes_all_at_once_has_no_time_per_token() -> None:
    """Several tokens in one moment tell nothing of the time between them, and certainly not zero."""
    found = TokenStream("m", 0.0)
    for data in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "length"}]}):
        found.take(json.dumps(data).encode(), 1.0)
    assert (found.query().first_s, found.query().tokens, found.query().per_token_s) == (1.0, 2, None)


def test_an_answer_in_one_piece_has_no_time_per_token_though_its_end_comes_later() -> None:
    """What lies between the piece and the end is no time per token; two pieces are."""
    found = TokenStream("m", 0.0)
    for now_s, data in (
        (1.0, {"choices": [{"delta": {"content": "a" * 16}}]}),
        (1.00005, {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 16}}),
    ):
        found.take(json.dumps(data).encode(), now_s)
    assert (found.query().first_s, found.query().tokens, found.query().per_token_s) == (1.0, 16, None)


def test_answers_in_one_piece_are_noted(serve: Serve) -> None:
    """So that a user learns why there is no time per token."""
    with opened(serve(piece("a" * 7), piece("", "length"), usage(7), DONE)) as workload:
        assert isinstance(workload, Noting)
        before = workload.notes
        assert workload.query().per_token_s is None
        assert "1 of 1 answers of" in workload.notes[-1]
        assert "(tpot) is unknown" in workload.notes[-1]
        assert len(workload.notes) == len(before) + 1


def test_the_first_token_of_an_answer_without_text_is_its_end() -> None:
    """It had come by then; were it left out, slow answers would be missing from the percentiles."""
    found = TokenStream("m", 0.0)
    found.take(b'{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}', 1.0)
    assert (found.query().first_s, found.query().tokens, found.query().per_token_s) == (1.0, 3, None)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    """Pieces of a connection end anywhere; comments and other fields are left out."""
    text = ": ping\r\n\r\nevent: x\ndata: {}\r\n\ndata:[DONE]\n\ndata: häh\n\n".encode()
    events = Events("m")
    found = [data for i in range(0, len(text), size) for data in events.take(text[i : i + size])]
    assert found == [b"{}", b"[DONE]", "häh".encode()]


def test_a_stream_without_a_last_word_is_whole_once_it_says_why_it_ends(serve: Serve) -> None:
    """Some servers leave out [DONE]; the reason to finish is enough."""
    with opened(serve(piece("a"), piece("", "length"), usage(4))) as workload:
        assert workload.query().tokens == 4


def test_several_answers_are_under_way_at_once(serve: Serve) -> None:
    """Each in its own stream."""
    server = serve()

    async def three(workload: Concurrent) -> list[int | None]:
        queries = await asyncio.gather(*[workload.send() for _ in range(3)])
        await workload.hang_up()
        return [query.tokens for query in queries]

    with opened(server, "?concurrency=3") as workload:
        assert isinstance(workload, Concurrent)
        assert workload.concurrency == 3
        assert asyncio.run(three(workload)) == [7, 7, 7]


def test_a_server_that_does_not_know_how_to_be_asked_to_count_is_not_asked(serve: Serve) -> None:
    """stream_options is left out from then on."""
    server = serve()
    whole = server.answers[CHAT]

    def picky(handler: Handler, body: bytes) -> None:
        if b"stream_options" in body:
            handler.document({"error": {"message": "Extra inputs are not permitted: stream_options"}}, 400)
        else:
            whole(handler, body)

    server.answers[CHAT] = picky
    with opened(server) as workload:
        assert workload.query().tokens == 7


# --- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_shown(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the server repeats it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = serve()
    with opened(server) as workload:
        workload.query()
        assert server.seen[-1][2]["Authorization"] == f"Bearer {KEY}"
        assert KEY not in repr(workload.__dict__["_address"])
        server.answers[CHAT] = lambda handler, _: handler.document({"error": f"bad key {KEY}"}, 500)
        with pytest.raises(TrialError, match="bad key …") as caught:
            workload.query()
    assert KEY not in str(caught.value)
    server.answers[CHAT] = lambda handler, _: handler.document({"error": f"Incorrect API key provided: {KEY}"}, 401)
    with pytest.raises(PermissionDenied, match=r"provided: …; put the server's key into \$OPENAI_API_KEY") as refused:
        open_workload(f"openai://{server.where}/org/m")
    assert KEY not in str(refused.value)


def test_no_key_is_sent_where_there_is_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of one's own need none."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = serve()
    with opened(server):
        pass
    assert "Authorization" not in server.seen[0][2]


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        ("?endpoint=embeddings", UnknownName, "known: chat, completions"),
        ("?max_token=3", UnknownName, "did you mean max_tokens"),
        ("?max_tokens=0", InvalidInput, "whole numbers from 1"),
        ("?max_tokens=1,2", InvalidInput, "give one number"),
        ("?stall=soon", InvalidInput, "a number of seconds"),
        ("?stall=0", InvalidInput, "a number of seconds"),
        ("?stall=nan", InvalidInput, "a number of seconds"),
        ("?ignore_eos=perhaps", UnknownName, "known: false, true"),
        ("?prompts=none.txt", BadFile, "cannot be read: No such file"),
        ("?prompts=none.txt&prompt_tokens=5", InvalidInput, "leave prompt_tokens out"),
    ],
)
def test_a_malformed_option_is_one_line(serve: Serve, options: str, error: type[Exception], line: str) -> None:
    """Nothing is sent before the options are understood."""
    server = serve()
    with pytest.raises(error, match=line), opened(server, options):
        pass
    assert not server.seen


@pytest.mark.parametrize(("text", "line"), [(b"\n \n", "holds no prompts"), (b"\xff\xfe\x00", "no UTF-8 text")])
def test_a_file_without_prompts_is_refused(serve: Serve, tmp_path: Path, text: bytes, line: str) -> None:
    """Empty, or no text at all."""
    (tmp_path / "prompts").write_bytes(text)
    with pytest.raises(BadFile, match=line), opened(serve(), "?prompts=prompts"):
        pass


@pytest.mark.parametrize("words", [{"inputs": ["3x4"]}, {"batch_sizes": [1]}, {"threads": [1]}])
def test_a_language_model_is_asked_in_words(serve: Serve, words: dict[str, Any]) -> None:
    """Shapes, batches and threads are refused."""
    with pytest.raises(InvalidInput, match="leave --"), opened(serve(), **words):
        pass


# --- bad servers -----------------------------------------------------------------------------------------------------


def test_a_wrong_model_lists_those_there_are(serve: Serve) -> None:
    """The nearest are named."""
    server = serve()
    server.answers[CHAT] = lambda handler, _: handler.document({"error": {"message": "no such model"}}, 404)
    with pytest.raises(UnknownName, match=r"'org/mimi'; did you mean org/mini"):
        open_workload(f"openai://{server.where}/org/mimi")


def test_a_server_that_serves_a_model_it_does_not_list_is_taken_at_its_word(serve: Serve) -> None:
    """Lists are not always whole; but it is noted, as what answers may be another model."""
    server = serve()
    workload = open_workload(f"openai://{server.where}//models/tuned")
    assert workload.query().tokens == 7
    assert asked(server)[0]["model"] == "/models/tuned"
    assert isinstance(workload, Noting)
    assert "answers as /models/tuned but does not list it (it lists org/m, org/mini)" in workload.notes[0]
    workload.close()


@pytest.mark.parametrize("where", ["listing", "query"])
def test_a_connection_an_error_came_over_is_not_used_again(serve: Serve, where: str) -> None:
    """Some servers hang up behind an error without saying so, as uvicorn does where listing models fails."""
    server, spent = serve(), set()
    whole = server.answers[CHAT]

    def failing(handler: Handler, _: bytes) -> None:
        spent.add(handler.client_address)
        handler.raw(b"Internal Server Error", 500)

    def answering(handler: Handler, body: bytes) -> None:
        if handler.client_address in spent:
            handler.close_connection = True
        else:
            whole(handler, body)

    server.answers |= {("GET", "/v1/models"): failing} if where == "listing" else {}
    server.answers[CHAT] = answering
    with opened(server) as workload:
        if where == "query":
            server.answers[CHAT] = failing
            with pytest.raises(TrialError, match="Internal Server Error"):
                workload.query()
            server.answers[CHAT] = answering
        assert workload.query().tokens == 7
    assert spent


@pytest.mark.parametrize("listed", [{"data": 5}, {"data": [5]}, [], "x", {"data": []}])
def test_a_list_of_models_of_another_form_is_no_remark(serve: Serve, listed: Any) -> None:
    """Not every server has one."""
    server = serve()
    server.answers["GET", "/v1/models"] = lambda handler, _: handler.document(listed)
    with opened(server) as workload:
        assert isinstance(workload, Noting)
        assert workload.notes == ()


@pytest.mark.parametrize(
    ("document", "status", "error", "line"),
    [
        ({"error": {"message": "context\nis too long"}}, 400, InvalidInput, r"refuses \(400\): context is too long"),
        ({"detail": [{"msg": "field required"}]}, 422, InvalidInput, r"refuses \(422\): field required"),
        ({"object": "error", "message": "boom"}, 500, TrialError, r"answers with an error \(500\): boom"),
        ("", 503, TrialError, r"answers with an error \(503\): an empty answer"),
        ({"error": "slow down"}, 429, TrialError, r"answers with an error \(429\): slow down"),
        ({"error": "no"}, 403, PermissionDenied, r"refuses \(403\): no; put the server's key into"),
    ],
)
def test_a_refusal_is_the_same_whenever_it_comes(
    serve: Serve, document: Any, status: int, error: type[Exception], line: str
) -> None:
    """Whatever form the server gives it, on one line; with the same exit code before a window and within."""
    server = serve()
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: handler.document(document, status)
        with pytest.raises(error, match=line):
            workload.query()
        with pytest.raises(error, match=line), opened(server):
            pass


def test_a_server_of_another_kind_is_called_that(serve: Serve) -> None:
    """It has no such path, and lists no models."""
    server = serve()
    server.answers.clear()
    with pytest.raises(DeviceError, match="is no OpenAI-compatible server"), opened(server):
        pass


def test_an_answer_in_one_piece_is_no_stream(serve: Serve) -> None:
    """Then nothing could be told of its first token."""
    server = serve()
    server.answers[CHAT] = lambda handler, _: handler.document({"choices": [{"message": {"content": "hello"}}]})
    with pytest.raises(TrialError, match="answers with application/json instead of a stream"), opened(server):
        pass


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize(
    "parts", [(), (piece("a"),), (piece("a"), piece("b"), usage(2)), (b'data: {"choices": [{"de',)]
)
def test_a_stream_that_is_cut_off_spoils_the_query(serve: Serve, parts: tuple[bytes, ...], end: bool) -> None:
    """Half an answer is never a latency, whether or not the connection ends in order."""
    server = serve()
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: stream(handler, *parts, end=end)
        with pytest.raises(TrialError, match=r"cut off|closed the connection"):
            workload.query()


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (event({"error": {"message": "the engine died"}}), "breaks off after 1 pieces: the engine died"),
        (event({"error": "out of blocks"}), "breaks off after 1 pieces: out of blocks"),
        (b"data: <html>\n\n", "streams something that is no JSON: <html>"),
        (b"data: [1]\n\n", "breaks off"),
        (b"data: \xff\xfe\n\n", "streams something that is no JSON"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "streams something that is no JSON"),
        (b"data: " + b" " * 2_000_000, "streams a line of more than 1 MiB"),
        (event({"choices": 5}), "no part of an answer"),
        (event({"choices": [5]}), "no part of an answer"),
        (event({"choices": [{"delta": [1]}]}), "no part of an answer"),
        (event({"usage": 5}), "no part of an answer"),
        (piece("", "abort"), "breaks off after 1 pieces: abort"),
    ],
)
def test_an_error_within_the_stream_spoils_the_query(serve: Serve, part: bytes, line: str) -> None:
    """Though the answer began well."""
    server = serve()
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: stream(handler, piece("a"), part, DONE)
        with pytest.raises(TrialError, match=line):
            workload.query()


@pytest.mark.parametrize("counted", [(), (usage(0),)])
@pytest.mark.parametrize("reason", ["stop", "content_filter", "length"])
def test_an_empty_answer_is_none(serve: Serve, reason: str, counted: tuple[bytes, ...]) -> None:
    """It would be the fastest of all, though nothing was made; the server's reason is passed on."""
    empty, server = (
        (piece(""), piece("", reason), *counted, DONE),
        serve(*(WHOLE if counted else (piece("a", "stop"),))),
    )
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: stream(handler, *empty)
        with pytest.raises(TrialError, match=rf"^the answer of org/m is empty \(finish reason {reason}\)$"):
            workload.query()


def test_a_server_whose_first_answer_is_empty_is_not_measured(serve: Serve) -> None:
    """Unless that one token was all it was to make: text may need more than one."""
    with pytest.raises(TrialError, match=r"is empty \(finish reason content_filter\)"):
        open_workload(f"openai://{serve(piece('', 'content_filter'), DONE).where}/org/m")
    with opened(serve(piece("", "length"), DONE)) as workload, pytest.raises(TrialError, match="is empty"):
        workload.query()


def test_tokens_without_text_count_only_where_the_server_counts(serve: Serve) -> None:
    """Where pieces are counted, an answer without any would have no tokens."""
    hidden = (piece("", "stop"), usage(5), DONE)
    with opened(serve(*hidden)) as workload:
        assert workload.query().tokens == 5
    server = serve(piece("a", "stop"), DONE)
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: stream(handler, *hidden)
        with pytest.raises(TrialError, match="is empty"):
            workload.query()


@pytest.mark.parametrize("tokens", [10**9, 64 + 9, 1, 0, -1])
def test_a_count_that_cannot_be_is_not_believed(serve: Serve, tokens: int) -> None:
    """More than were asked for and came, or fewer than there were pieces, none of which is less than a token."""
    server = serve(piece("a"), piece("b", "stop"), usage(tokens), DONE)
    with opened(server) as workload, pytest.raises(TrialError, match=rf"says that 2 pieces are {tokens:,} tokens, of"):
        workload.query()


def test_more_pieces_than_tokens_asked_for_are_believed(serve: Serve) -> None:
    """A server may not keep to max_tokens; what it counts then is what came."""
    server = serve(*[piece("a")] * 50, piece("b", "stop"), usage(51), DONE)
    with opened(server, "?max_tokens=8") as workload:
        assert workload.query().tokens == 51


def test_tokens_are_counted_one_way_throughout(serve: Serve) -> None:
    """As the server did for the first answer, or the figures of a window would not go together."""
    server = serve()
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: stream(handler, piece("a"), piece("b", "stop"), DONE)
        with pytest.raises(TrialError, match="does not say how many tokens this answer has, as it did before"):
            workload.query()
    server.answers[CHAT] = lambda handler, _: stream(handler, piece("a"), piece("b", "stop"), DONE)
    with opened(server) as workload:
        server.answers[CHAT] = lambda handler, _: stream(handler, *WHOLE)
        assert workload.query().tokens == 2


@pytest.mark.parametrize("kind", ["role", "empty", "comment"])
def test_signs_of_life_that_are_no_token_do_not_count(serve: Serve, kind: str) -> None:
    """An answer that goes on without getting on has stalled."""
    server = serve()
    sign = {"role": piece(""), "empty": event({"choices": []}), "comment": b": still here\n\n"}[kind]

    def going_on(handler: Handler, _: bytes) -> None:
        stream(handler, piece("a"), end=False)
        while not server.over.wait(0.05):
            handler.wfile.write(f"{len(sign):x}\r\n".encode() + sign + b"\r\n")

    server.answers[CHAT] = going_on
    with pytest.raises(TrialError, match=r"stalled: nothing for 0.3 s after 1 pieces"), opened(server, "?stall=0.3"):
        pass


def test_a_stream_that_is_not_closed_has_stalled(serve: Serve) -> None:
    """All tokens are there, but waiting for more would make every query look slow."""
    server = serve()

    def open_ended(handler: Handler, _: bytes) -> None:
        stream(handler, *WHOLE, end=False)
        server.over.wait()

    server.answers[CHAT] = open_ended
    with pytest.raises(TrialError, match=r"stalled: nothing for 0.3 s after its end"), opened(server, "?stall=0.3"):
        pass


def test_the_key_is_not_shown_where_the_stream_repeats_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in an error nor in something that is no JSON, nor as the reason to end."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for part in (event({"error": f"bad key {KEY}"}), f"data: {KEY}\n\n".encode(), piece("", KEY)):
        with pytest.raises(TrialError, match="…") as caught, opened(serve(part)):
            pass
        assert KEY not in str(caught.value)


def test_a_stream_that_stalls_is_given_up(serve: Serve) -> None:
    """Long before the time for a whole answer is over; signs of life that are no token do not count."""
    server = serve()

    def stalling(handler: Handler, _: bytes) -> None:
        stream(handler, piece("a"), piece("b"), b": still here\n\n", end=False)
        server.over.wait()

    with opened(server, "?stall=0.5", timeout_s=60.0) as workload:
        server.answers[CHAT] = stalling
        with pytest.raises(TrialError, match=r"stalled: nothing for 0.5 s after 2 pieces"):
            workload.query()


def test_a_stream_that_does_not_begin_is_given_up(serve: Serve) -> None:
    """The time for a whole answer bounds the first token."""
    server = serve()
    with opened(server, "?stall=60", timeout_s=1.0) as workload:
        server.answers[CHAT] = lambda *_: server.over.wait() and None
        with pytest.raises(TrialError, match=r"did not answer within 1 s"):
            workload.query()


def test_redirects_are_not_followed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key goes to the server it was given for and nowhere else."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server, other = serve(), serve()
    server.answers[CHAT] = lambda handler, _: handler.raw(
        b"", 307, Location=f"http://{other.where}/v1/chat/completions"
    )
    with pytest.raises(TrialError, match=r"sends on to http.*, which is not followed"), opened(server):
        pass
    assert not other.seen


# --- the bound on the requests in flight, behind a proxy -------------------------------------------------------------


def bounded(server: FakeServer, limit: int = 3) -> list[int]:
    """Have a server speak as a proxy does of its limit; returns the limits that held, the first one first."""
    held = [limit]

    def put(handler: Handler, body: bytes) -> None:
        held.append(json.loads(body)["limit"])
        handler.document({"limit": held[-1], "running": 0, "waiting": 0})

    server.answers["GET", "/polythrottle/in_flight"] = lambda handler, _: handler.document({"limit": held[-1]})
    server.answers["PUT", "/polythrottle/in_flight"] = put
    return held


def test_the_bound_in_flight_is_a_knob_and_is_set_again_in_the_end(serve: Serve) -> None:
    """The bound that was found is among its levels and the default; one that holds already is not set."""
    server = serve()
    held = bounded(server)
    with opened(server, "?in_flight=8,1&concurrency=8") as workload:
        assert [dict(point)["in_flight"] for point in workload.space] == [1, 3, 8]
        assert workload.space.default == OperatingPoint({"in_flight": 3})
        for limit in (3, 8, 8, 1):
            workload.apply(OperatingPoint({"in_flight": limit}))
        assert held == [3, 8, 1]
        assert isinstance(workload, Noting)
        assert workload.notes == ()
    assert held == [3, 8, 1, 3]


def test_a_bound_that_no_proxy_keeps_is_refused(serve: Serve) -> None:
    """Where there is no proxy, where it lets nobody through, and where it does not take a bound."""
    server = serve()
    with pytest.raises(DeviceError, match="no polythrottle proxy is at"):
        open_workload(f"openai://{server.where}/org/m?in_flight=4")
    bounded(server, 0)
    with pytest.raises(DeviceError, match="holds all requests back"):
        open_workload(f"openai://{server.where}/org/m?in_flight=4")
    bounded(server)
    error = {"error": {"message": "the limit is set from the machine that the proxy runs on"}}
    server.answers["PUT", "/polythrottle/in_flight"] = lambda handler, _: handler.document(error, 403)
    with opened(server, "?in_flight=4") as workload:
        assert isinstance(workload, Noting)
        assert "--arrivals" in workload.notes[0]
        with pytest.raises(KnobRejected, match=r"does not take in_flight=4 \(403\): the limit is set from the machine"):
            workload.apply(OperatingPoint({"in_flight": 4}))


def test_a_proxy_that_is_gone_in_the_end_is_said(serve: Serve) -> None:
    """Its bound could not be set as it was found, and how to is said."""
    server = serve()
    bounded(server)
    workload = open_workload(f"openai://{server.where}/org/m?in_flight=4")
    workload.apply(OperatingPoint({"in_flight": 4}))
    del server.answers["PUT", "/polythrottle/in_flight"]
    with pytest.raises(DeviceError, match=r"does not take in_flight=3 .*; set it by hand"):
        workload.close()
