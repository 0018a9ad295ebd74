"""Flows in the console: where each is, and its steps as a graph."""

import pytest

from tests.server.console.conftest import Site
from tests.server.http.conftest import run

KIND = "flow:create-vm"


@pytest.fixture(scope="module")
def flowing(site: Site) -> Site:
    """A flow whose first step has succeeded, and whose second waits."""
    site.schedule(KIND, id="web-1", payload={"step": "create", "state": {"name": "web"}})
    (task,) = site.claim(KIND)
    site.settle(task, "success", result={"to": "verify", "state": {"name": "web"}})
    site.schedule(KIND, id="web-1.2", payload={"step": "verify", "flow": "web-1"}, parent="web-1")
    return site


def test_a_flow_is_listed_with_the_step_at_which_it_is(flowing: Site) -> None:
    page = flowing.see("flows")
    assert "create-vm" in page.text
    assert "web-1 ● running verify 1" in page.text


def test_the_page_of_a_step_shows_the_steps_of_its_flow_with_that_one_lit(flowing: Site) -> None:
    page = flowing.see("task?id=web-1")
    assert "Flow create-vm" in page.text
    assert ">create</text>" in page.html
    assert ">verify</text>" in page.html
    assert page.html.count(" lit") == 1


def test_what_no_flow_has_written_is_no_error(site: Site) -> None:
    site.schedule("flow:strange", id="strange", payload=[1])
    assert site.see("flows?name=strange").status == 200
    assert site.see("task?id=strange").status == 200


def test_without_flows_the_page_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with run(f"sqlite:///{tmp_path_factory.mktemp('none')}/tasks.db", console="on") as server:
        assert "There are none" in Site(server).see("flows").text
