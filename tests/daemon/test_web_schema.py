"""The OpenAPI document: what it says is what the API does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from http_over_socket import ask
from hypothesis import HealthCheck, Phase, settings
from scripted import Script, daemon

from polythrottle.daemon.status import StudyShown
from polythrottle.daemon.web import Tcp
from polythrottle.daemon.web.routes import OPERATIONS, document

pytestmark = pytest.mark.schema
TOKEN = "0123456789abcdef-secret"
EXAMPLES = 60
REFUSED = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
"""Schemathesis's own, and 413: a text beyond its ``maxLength`` may make the whole body larger than any may be."""
CHECKS = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}})
SCHEMA = schemathesis.openapi.from_dict(document(), config=CHECKS)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Script, Path]]:
    """Return a scripted control loop and where its API is."""
    with daemon(tmp_path / "d.sock") as (script, _):
        script.tell("a", "b")
        script.show(study=StudyShown("s1", "ended"))
        yield script, tmp_path / "d.sock"


def test_every_operation_is_described() -> None:
    """Names are unique, every refusal has its schema, and every 5xx but 503 and 507 is missing."""
    described = document()
    operations = [each for path in described["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names) == len(OPERATIONS) + 1
    codes = {code for each in operations for code in each["responses"]}
    assert {code for code in codes if code >= "500"} == {"503", "507"}


def test_the_document_is_served_as_it_is(served: tuple[Script, Path]) -> None:
    """Byte for byte what the table says."""
    assert ask(served[1], "GET", "/openapi.json")[1] == document()


@pytest.mark.parametrize("path", sorted(path for path in document()["paths"] if path.startswith("/v1")))
def test_answers_are_what_the_document_says(served: tuple[Script, Path], path: str) -> None:
    """Each answer in JSON to GET holds its schema."""
    described = document()["paths"][path].get("get")
    if described is None or "application/json" not in described["responses"]["200"]["content"]:
        return
    status, answer, _ = ask(served[1], "GET", path.replace("{id}", "s1"))
    assert status == 200
    jsonschema.validate(answer, described["responses"]["200"]["content"]["application/json"]["schema"])


def test_the_status_of_another_version_still_holds_its_schema(served: tuple[Script, Path]) -> None:
    """A field more is no violation: answers only ever gain fields."""
    schema: dict[str, Any] = document()["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]
    answer = ask(served[1], "GET", "/v1/status")[1]
    jsonschema.validate({**answer, "new": 1}, schema["application/json"]["schema"])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a scripted daemon on TCP."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    tcp = Tcp("127.0.0.1", 0, token_file=folder / "token")
    with daemon(folder / "d.sock", lambda options: type(options)(options.socket, tcp=tcp)) as (script, server):
        script.tell("a", "b")
        script.show(study=StudyShown("s1", "ended"))
        yield f"http://127.0.0.1:{server.port}"


@SCHEMA.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_nothing_that_is_sent_breaks_the_api(case: Any, url: str) -> None:
    """Schemathesis finds no 5xx and no answer that the document does not describe."""
    case.call_and_validate(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20)
