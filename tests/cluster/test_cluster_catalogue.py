"""Catalogues: what is read, and the one line that each wrong file gets."""

from pathlib import Path

import pytest

from polythrottle.cluster.catalogue import read_catalogue
from polythrottle.domain.errors import BadFile
from polythrottle.domain.fleet.transient_machine import Market

GOOD = """
[work]
name = "job"
steps = 1000
checkpoint_stall_s = 3.8
restart_s = 8

[server]
usd_per_h = 0.1
power_w = 50

[machines.a]
gpu = "V100"
region = "east"
steps_per_s = 5
speedups = [1, 1.9, 2.7]
startup_s = 170
idle_w = 45
host_w = 100
usd_per_h = { spot = 0.8, on-demand = 2.4 }
lifetime = { rate_per_h = 0.1 }
caps = [{ limit_w = 250, power_w = 227 }, { limit_w = 200, slowdown = 1.06, power_w = 190 }]

[machines.b]
gpu = "K80"
steps_per_s = 1
most = 4
startup_s = 160
idle_w = 50
usd_per_h = { on-demand = 0.7 }
caps = [{ power_w = 120 }]
"""

STEPS = "gpu,network,flops,n_parameters,n_tensors,step_time_s\n" + "".join(
    f"V100,n{size},{size}e9,{size}e6,{50 * size},{0.02 * size + 0.01}\n" for size in (1, 2, 3, 5, 8)
)


def written(folder: Path, text: str) -> Path:
    """Return a file with a text."""
    path = folder / "catalogue.toml"
    path.write_text(text)
    return path


def test_a_catalogue_is_read_whole(tmp_path: Path) -> None:
    """Work, server, machines, prices, lifetimes and caps are what the file says."""
    found = read_catalogue(written(tmp_path, GOOD))
    first, second = found.offers
    assert (found.work.steps, found.work.cost.stall_s, found.work.cost.persist_s) == (1000, 3.8, 3.8)
    assert (found.work.server.usd_per_h, found.work.server.power_w) == (0.1, 50)
    assert first.machine.usd_per_h == {Market.SPOT: 0.8, Market.ON_DEMAND: 2.4}
    assert [(cap.limit_w, cap.slowdown, cap.power_w) for cap in first.machine.caps] == [(250, 1, 327), (200, 1.06, 290)]
    assert (first.step_s, first.speedups, first.startup_s) == (0.2, (1, 1.9, 2.7), 170)
    assert first.lifetime.hazard_per_s(0) == pytest.approx(0.1 / 3600)
    assert second.speedups == (1, 2, 3, 4)
    assert second.known["scaling"] == "assumed even"
    assert second.lifetime.survival(1e9) == 1


def test_work_can_be_hours_of_a_machine(tmp_path: Path) -> None:
    """Ten hours of a machine of five steps per second are 180,000 steps."""
    text = GOOD.replace("steps = 1000", 'machine_h = 10\nof = "a"')
    assert read_catalogue(written(tmp_path, text)).work.steps == pytest.approx(180_000)


def test_steps_come_from_a_table_or_are_predicted_from_it(tmp_path: Path) -> None:
    """A network the table has is looked up; one it lacks is predicted from its operations and tensors."""
    (tmp_path / "steps.csv").write_text(STEPS)
    base = GOOD.replace("steps_per_s = 5\n", "")
    known = base.replace("[work]", '[work]\nnetwork = "N3"\nspeeds = "steps.csv"')
    (offer, _) = read_catalogue(written(tmp_path, known)).offers
    assert offer.step_s == pytest.approx(0.07)
    assert offer.known["speed"] == "recorded"
    unknown = known.replace('"N3"', '"new"\nflops = 4e9\nn_tensors = 200')
    (offer, _) = read_catalogue(written(tmp_path, unknown)).offers
    assert offer.step_s == pytest.approx(0.09, rel=0.1)
    assert offer.known["speed"] == "predicted from 5 networks"
    with pytest.raises(BadFile, match=r"no row for new on V100.*work\.flops"):
        read_catalogue(written(tmp_path, known.replace("N3", "new")))


def test_lifetimes_are_given_as_a_curve_published_or_limited(tmp_path: Path) -> None:
    """Ages and survivals, CM-DARE's figures, and a provider's limit on top."""
    curve = GOOD.replace("{ rate_per_h = 0.1 }", "{ ages_h = [0, 1, 24], survivals = [1, 0.9, 0], limit_h = 12 }")
    (offer, _) = read_catalogue(written(tmp_path, curve)).offers
    assert offer.lifetime.survival(1800) == pytest.approx(0.95)
    assert offer.lifetime.survival(12 * 3600) == 0
    published = GOOD.replace("{ rate_per_h = 0.1 }", "{ published = true, zone = 'us-central1' }")
    (offer, _) = read_catalogue(written(tmp_path, published)).offers
    assert offer.lifetime.survival(3600) == pytest.approx(0.33, abs=0.02)
    assert "CM-DARE" in offer.known["lifetime"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[work]\n", "[work]\nfoo = 1\n", "work.foo is not a key here"),
        ("steps = 1000", "", "needs either steps, or machine_h"),
        ("steps = 1000", "steps = 0", "work.steps must be a number above 0, not 0"),
        ("steps = 1000", "steps = nan", "work.steps must be a number above 0"),
        ("steps = 1000", "steps = true", "work.steps must be a number"),
        ("steps = 1000", 'machine_h = 3\nof = "zzz"', "work.of must name a machine of this file: a, b"),
        ("checkpoint_stall_s = 3.8", "", "work.checkpoint_stall_s is missing"),
        ("restart_s = 8", 'training = "both"', "work.training must be synchronous or asynchronous"),
        ("restart_s = 8", "noticed = 1.5", "work.noticed must be a share between 0 and 1"),
        ('gpu = "V100"\n', "", "machines.a.gpu is missing"),
        ("steps_per_s = 5\n", "", "machines.a.steps_per_s is missing"),
        ("speedups = [1, 1.9, 2.7]", "speedups = []", "machines.a.speedups must be a list"),
        ("speedups = [1, 1.9, 2.7]", "speedups = [1, -2]", "machines.a.speedups must be a number"),
        ("speedups = [1, 1.9, 2.7]", "speedups = [1]\nmost = 4", "holds 1 speeds, fewer than most"),
        ("most = 4", "most = 0", "machines.b.most must be a whole number from 1 to 1024"),
        ("usd_per_h = { spot = 0.8, on-demand = 2.4 }", "", "machines.a.usd_per_h is missing"),
        ("usd_per_h = { spot = 0.8, on-demand = 2.4 }", "usd_per_h = { night = 2 }", "night is not a key here"),
        ("spot = 0.8", 'spot = "cheap"', "machines.a.usd_per_h.spot must be a number"),
        ("lifetime = { rate_per_h = 0.1 }", "", "machines.a.lifetime is missing: it has a spot price"),
        ("rate_per_h = 0.1", "rate_per_h = 0.1, published = true", "machines.a.lifetime is given twice"),
        ("rate_per_h = 0.1", "rate_per_h = -1", "rate_per_h must be a number of at least 0"),
        ("rate_per_h = 0.1", "ages_h = [0, 1], survivals = [1, 2]", "machines.a.lifetime does not hold"),
        ("rate_per_h = 0.1", 'table = "none.csv"', "lifetime.table names a file that is not there"),
        ("caps = [{ power_w = 120 }]", "caps = []", "machines.b.caps is missing"),
        ("caps = [{ power_w = 120 }]", "caps = [{ limit_w = 100 }]", "caps[0].power_w is missing"),
        ("caps = [{ power_w = 120 }]", "caps = 3", "caps must be an array of tables"),
        ("spot = 0.8", 'spot = { table = "none.csv", instance_type = "x" }', "names a file that is not there"),
        ("[server]\n", "[server]\ncount = 1.5\n", "server.count must be a whole number"),
        ("[work]", "[wrok]", "wrok is not a key here"),
    ],
)
def test_each_wrong_key_is_one_clear_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    """The message names the file, the key and what was expected."""
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(BadFile) as caught:
        read_catalogue(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("[work]\nsteps = 1\n", "machines holds no machine"),
        ("[machines.a]\n", "work is missing"),
        ("= 3", "not a TOML file"),
        ("[work]\nsteps = 1\ncheckpoint_stall_s = 1\n[machines]\na = 3", "machines.a must be a table"),
    ],
)
def test_a_file_that_is_no_catalogue_says_so(tmp_path: Path, text: str, said: str) -> None:
    """An empty, broken or foreign file is a bad file."""
    with pytest.raises(BadFile, match=said):
        read_catalogue(written(tmp_path, text))
    with pytest.raises(BadFile, match=r"cannot be read: No such file or directory$"):
        read_catalogue(tmp_path / "absent.toml")


def test_tables_that_are_wrong_name_the_place_in_the_catalogue(tmp_path: Path) -> None:
    """A table without the machine, or that is no table, is told with the key that named it."""
    (tmp_path / "prices.csv").write_text(
        "timestamp,zone,instance_type,product,price_usd_per_h\n2020-01-01T00:00:00,east-1,p3,Linux/UNIX,0.9\n"
    )
    text = GOOD.replace("spot = 0.8", 'spot = { table = "prices.csv", instance_type = "p2" }')
    with pytest.raises(BadFile, match=r"machines\.a\.usd_per_h\.spot does not hold.*no prices of p2.*it has p3"):
        read_catalogue(written(tmp_path, text))
    (tmp_path / "prices.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadFile, match="has no column"):
        read_catalogue(written(tmp_path, text))
    lives = GOOD.replace("rate_per_h = 0.1", 'table = "prices.csv"')
    with pytest.raises(BadFile, match=r"machines\.a\.lifetime does not hold.*has no column"):
        read_catalogue(written(tmp_path, lives))


def test_the_shipped_example_works_alone() -> None:
    """The example of 2019 needs no table, and offers three machines."""
    example = Path(__file__).resolve().parents[2] / "examples" / "cluster-gcp-2019.toml"
    found = read_catalogue(example)
    assert [offer.machine.gpu for offer in found.offers] == ["K80", "P100", "V100"]
    assert not any(found.histories.values())


def test_the_recorded_example_reads_the_tables(transient: Path) -> None:
    """The example on recorded data finds prices of every zone, lifetimes and caps where the tables lie."""
    example = Path(__file__).resolve().parents[2] / "examples" / "cluster-aws-recorded.toml"
    found = read_catalogue(example)
    assert transient.is_dir()
    assert len(found.histories["p3.2xlarge"]) > 3
    assert len(found.offers[0].machine.caps) > 20
    assert 0.5 < found.offers[0].machine.usd_per_h[Market.SPOT] < 2
    assert len(found.places(2)) == sum(map(len, found.histories.values()))


def test_slowdowns_count_from_the_default(tmp_path: Path) -> None:
    """The first cap is the default, whatever its row says: speeds are given for it."""
    path = tmp_path / "c.toml"
    path.write_text(GOOD.replace("limit_w = 250,", "limit_w = 250, slowdown = 2,"))
    assert [cap.slowdown for cap in read_catalogue(path).offers[0].machine.caps] == [1, pytest.approx(0.53)]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("spot = 0.8", "spot = 1e300", r"usd_per_h.spot must be 0 or from 1e-12 to 1e\+24"),
        ("steps_per_s = 5", "steps_per_s = 1e-30", "steps_per_s must be 0 or from"),
        ("[machines.a]", "[[jobs]]\nname = 'j'\n[machines.a]", "jobs is for several jobs"),
        (
            "{ limit_w = 200, slowdown = 1.06, power_w = 190 }",
            ", ".join(f"{{ limit_w = {249 - n / 2}, power_w = 100 }}" for n in range(201)),
            "caps holds more than 200 rows",
        ),
        ("spot = 0.8", f"spot = {{ table = '{'x' * 300}', instance_type = 'x' }}", "names a file that cannot be read"),
    ],
)
def test_what_cannot_be_computed_with_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Figures beyond all measure, rows that would be left out, and catalogues of another kind are one line."""
    path = tmp_path / "c.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(BadFile, match=said):
        read_catalogue(path)
