"""Servers in this process that answer as they are told to, well or badly: KServe v2, and the API of OpenAI."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

HEADER_LENGTH = "Inference-Header-Content-Length"
Answer = Callable[["Handler", bytes], None]


class Handler(BaseHTTPRequestHandler):
    """One request; what answers it is looked up by method and path."""

    protocol_version = "HTTP/1.1"
    server: "FakeServer"

    def do_GET(self) -> None:
        """Answer."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answer."""
        self._answer("POST")

    def do_PUT(self) -> None:
        """Answer."""
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((method, self.path, dict(self.headers), body))
        answer = self.server.answers.get((method, self.path))
        if answer is None:
            self.document({"error": f"no {self.path} here"}, 404)
        else:
            answer(self, body)

    def document(self, found: Any, status: int = 200) -> None:
        """Send a JSON document."""
        self.raw(json.dumps(found).encode(), status)

    def raw(
        self, body: bytes, status: int = 200, *, kind: str = "application/json", length: int | None = None, **more: str
    ) -> None:
        """Send bytes; ``length`` is what the header claims, -1 that it claims nothing."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length == -1:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if length not in (None, -1):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class FakeServer(ThreadingHTTPServer):
    """Listens on a free port of the loopback; ``answers`` may be changed at any time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[tuple[str, str], Answer] = {}
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.over = threading.Event()

    @property
    def where(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hang up are part of the tests."""


@contextmanager
def listening(server: FakeServer) -> Iterator[FakeServer]:
    """Let a server answer while this is open; whoever waits for ``server.over`` is let go in the end."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def doubling(handler: Handler, body: bytes) -> None:
    """Answer an inference request with every input doubled, in bytes if it came so."""
    length = handler.headers.get(HEADER_LENGTH)
    request = json.loads(body[: int(length)] if length else body)
    rest, outputs, tensors = body[int(length) :] if length else b"", [], []
    for each in request["inputs"]:
        head = {"name": f"{each['name']}-doubled", "shape": each["shape"], "datatype": each["datatype"]}
        if length:
            size = each["parameters"]["binary_data_size"]
            tensor, rest = np.frombuffer(rest[:size], np.float32), rest[size:]
            assert tensor.size == np.prod(each["shape"])
            tensors.append((2 * tensor).tobytes())
            outputs.append({**head, "parameters": {"binary_data_size": size}})
        else:
            assert len(each["data"]) == np.prod(each["shape"])
            outputs.append({**head, "data": [2 * number for number in each["data"]]})
    text = json.dumps({"model_name": "m", "outputs": outputs}).encode()
    handler.raw(text + b"".join(tensors), **({HEADER_LENGTH: str(len(text))} if tensors else {}))


def kserve(
    inputs: list[dict[str, Any]], *, extensions: tuple[str, ...] = (), config: dict[str, Any] | None = None
) -> FakeServer:
    """Return a KServe v2 server of one model, ``m``, that doubles its inputs.

    Args:
        inputs: What the model declares.
        extensions: What the server lists.
        config: The model's; loading the model replaces it.
    """
    server, held = FakeServer(), {"config": config}

    def load(handler: Handler, body: bytes) -> None:
        held["config"] = json.loads(json.loads(body)["parameters"]["config"])
        handler.raw(b"")

    tell: Callable[[Any], Answer] = lambda found: lambda handler, _: handler.document(found)  # noqa: E731
    server.answers = {
        ("GET", "/v2"): tell({"name": "fake", "version": "1", "extensions": list(extensions)}),
        ("GET", "/v2/models/m"): tell({"name": "m", "inputs": inputs, "outputs": []}),
        ("GET", "/v2/models/m/config"): lambda handler, _: handler.document(held["config"]),
        ("POST", "/v2/models/m/infer"): doubling,
        ("POST", "/v2/repository/index"): tell(
            [{"name": "m", "state": "READY"}, {"name": "mobilenet", "state": "READY"}]
        ),
        ("POST", "/v2/repository/models/m/load"): load,
    }
    return server


def event(found: Any) -> bytes:
    """Return a server-sent event with a JSON document."""
    return f"data: {json.dumps(found)}\n\n".encode()


def piece(text: str, finish: str | None = None) -> bytes:
    """Return the event of one piece of a chat's answer."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    """Return the event that says how many tokens there were."""
    return event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})


def stream(handler: Handler, *parts: bytes, end: bool = True) -> None:
    """Send the parts of a stream one by one; without ``end`` the connection breaks behind them."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for part in parts:
        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        handler.wfile.flush()
    if end:
        handler.wfile.write(b"0\r\n\r\n")
    else:
        handler.close_connection = True


def openai(*parts: bytes) -> FakeServer:
    """Return an OpenAI-compatible server of the model ``org/m`` whose every answer is these parts of a stream."""
    server = FakeServer()
    whole: Answer = lambda handler, _: stream(handler, *parts)  # noqa: E731
    server.answers = {
        ("GET", "/v1/models"): lambda handler, _: handler.document({"data": [{"id": "org/m"}, {"id": "org/mini"}]}),
        ("POST", "/v1/chat/completions"): whole,
        ("POST", "/v1/completions"): whole,
    }
    return server


@contextmanager
def model_over_grpc() -> Iterator[str]:
    """Serve one model over gRPC that answers with zeros; yields host and port."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    server = grpc.server(ThreadPoolExecutor(4))

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ServerMetadata(self, request: Any, context: Any) -> Any:
            return service_pb2.ServerMetadataResponse(name="fake")

        def ModelMetadata(self, request: Any, context: Any) -> Any:
            found = service_pb2.ModelMetadataResponse(name="m")
            found.inputs.add(name="x", datatype="FP32", shape=[-1, 4])
            found.outputs.add(name="y", datatype="FP32", shape=[-1, 4])
            return found

        def ModelInfer(self, request: Any, context: Any) -> Any:
            answer = service_pb2.ModelInferResponse(model_name="m")
            size = request.inputs[0].shape[0]
            answer.outputs.add(name="y", datatype="FP32", shape=[size, 4])
            answer.raw_output_contents.append(b"\0" * (16 * size))
            return answer

    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
