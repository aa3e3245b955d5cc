"""Fitted distributions: known parameters come back, the right family is chosen, nothing wrong is believed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from aion.core.lateness.estimate import LateArrivals, arrivals
from aion.core.lateness.models import FAMILIES, FEWEST_EVENTS, NAMES, Fit, choose, fit, modelled
from tests.late import DAY, HOUR, SECOND, Draw, drawn, exponential, lognormal

# Each family with parameters of the usual kind, seconds for what has a unit.
TRUTHS: dict[str, tuple[Draw, stats.distributions.rv_frozen]] = {
    "lognormal": (lognormal(90, 1.2), stats.lognorm(1.2, scale=90)),
    "gamma": (lambda rng, n: rng.gamma(2.5, 40, n), stats.gamma(2.5, scale=40)),
    "weibull": (lambda rng, n: 80 * rng.weibull(0.7, n), stats.weibull_min(0.7, scale=80)),
    "pareto": (lambda rng, n: 60 * rng.pareto(1.8, n), stats.lomax(1.8, scale=60)),
}


def two_bumps(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.abs(np.where(rng.random(n) < 0.7, rng.normal(120, 25, n), rng.normal(600, 60, n)))


def learnt(
    draw: Draw, *, windows: int = 3000, late_share: float = 0.2, per_window: int = 10, seed: int = 0
) -> LateArrivals:
    lateness, at = drawn(
        draw, windows=windows, per_window=per_window, late_share=late_share, seed=seed, watched_us=6 * HOUR
    )
    known = arrivals(lateness.cohorts(at))
    assert known is not None
    return known


def usual(found: Fit) -> list[float]:
    """Parameters as the textbooks have them, in seconds where they have a unit."""
    scale = found.scale_us / SECOND
    p = found.parameters
    if found.family.name == "lognormal":
        return [float(np.exp(p[1])), float(np.exp(p[0])) * scale]
    return [float(np.exp(p[0])), float(np.exp(p[1])) * scale]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("lognormal", [1.2, 90]), ("gamma", [2.5, 40]), ("weibull", [0.7, 80]), ("pareto", [1.8, 60])],
)
def test_known_parameters_come_back(name: str, wanted: list[float]) -> None:
    found = fit(learnt(TRUTHS[name][0]), [name])[name]
    assert found.passes
    assert usual(found) == pytest.approx(wanted, rel=0.12)
    assert found.covariance is not None
    errors = np.sqrt(np.diag(found.covariance))
    # Both parameters are logarithms (or differ as such) for every family: within four standard errors.
    off = np.abs(np.log(usual(found)) - np.log(wanted))
    assert (off < 4 * (errors[::-1] if name == "lognormal" else errors)).all()


def test_a_mixture_finds_both_of_its_normals() -> None:
    found = choose(learnt(two_bumps))
    assert found is not None and found.family.name == "mixture"
    scale = found.scale_us / SECOND
    logit, m1, m2, s1, s2 = found.parameters.tolist()
    share = 1 / (1 + np.exp(-logit))
    (low, low_sd, low_share), (high, high_sd, _) = sorted(
        [(m1 * scale, np.exp(s1) * scale, share), (m2 * scale, np.exp(s2) * scale, 1 - share)]
    )
    assert (low, high) == (pytest.approx(120, rel=0.02), pytest.approx(600, rel=0.02))
    assert (low_sd, high_sd) == (pytest.approx(25, rel=0.1), pytest.approx(60, rel=0.1))
    assert low_share == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize("name", TRUTHS)
def test_the_right_family_is_chosen(name: str) -> None:
    found = choose(learnt(TRUTHS[name][0]))
    assert found is not None and found.family.name == name


@pytest.mark.parametrize("name", TRUTHS)
def test_what_was_not_seen_yet_does_not_bias_a_fit(name: str) -> None:
    """All windows are younger than an hour, and up to a tenth of their late events are yet to come."""
    draw, truth = TRUTHS[name]
    lateness, at = drawn(draw, windows=60, per_window=400, late_share=0.5)
    known = arrivals(lateness.cohorts(at))
    assert known is not None
    found = fit(known, [name])[name]
    for seconds in (30, 120, 600):
        assert 1 - float(found.up_to(seconds * SECOND)) == pytest.approx(truth.sf(seconds), abs=0.015)


def test_when_none_fits_it_is_what_was_seen() -> None:
    spikes: Draw = lambda rng, n: rng.choice([60.0, 61.0, 300.0, 900.0, 901.0, 4000.0], n)  # noqa: E731
    known = learnt(spikes)
    assert not any(found.passes for found in fit(known).values())
    assert choose(known) is None


def test_events_that_come_together_are_not_fitted() -> None:
    rng = np.random.default_rng(3)

    def bursts(rng_: np.random.Generator, n: int) -> np.ndarray:
        # One delay for all late events of a window.
        return np.full(n, rng.exponential(60))

    assert choose(learnt(bursts)) is None


def test_too_few_events_are_not_fitted() -> None:
    known = learnt(exponential(60), windows=30)
    assert known.events < FEWEST_EVENTS
    assert fit(known) == {}
    assert choose(known) is None


def test_a_model_knows_a_quantile_better_than_order_statistics_if_it_is_right() -> None:
    """Of 40 histories of a log-normal stream: its upper bounds hold as often as they shall, and are closer."""
    truth, confidence = TRUTHS["lognormal"][1], 0.9
    at = int(truth.ppf(0.97) * SECOND)
    held, margins = 0, []
    for seed in range(40):
        known = learnt(TRUTHS["lognormal"][0], windows=600, seed=seed)
        model = modelled(known, fit(known, ["lognormal"])["lognormal"])
        k = int(np.searchsorted(known.edges_us, at))
        upper = float(model.at_most(confidence)[k])
        held += upper >= truth.sf(known.edges_us[k] / SECOND)
        margins.append((upper - model.later[k], float(known.at_most(confidence)[k]) - known.later[k]))
    assert held >= 31, "36 of 40 are expected; less than 31 come once in 200 times"
    closer, plain = np.mean(margins, axis=0)
    assert closer < 0.85 * plain


def test_a_model_has_the_shape_of_a_history() -> None:
    known = learnt(TRUTHS["weibull"][0])
    model = modelled(known, fit(known, ["weibull"])["weibull"])
    assert model.source == "weibull" and known.source == "empirical"
    assert (model.watched_us, model.events, model.late_share) == (known.watched_us, known.events, known.late_share)
    assert model.later[0] == 1.0 and (np.diff(model.later) <= 0).all()
    assert (model.at_most(0.95) >= model.later - 1e-12).all() and (np.diff(model.at_most(0.95)) <= 0).all()
    assert model.later_than(known.edges_us) == pytest.approx(model.later)
    assert float(np.abs(model.later - known.later).max()) < 0.02
    assert 0 <= model.unseen < 1e-6


def test_families_are_distributions() -> None:
    x = np.geomspace(1e-9, 1e6, 500)
    for family in FAMILIES.values():
        p = family.start(np.array([0.5, 1.0, 3.0]), np.array([0.3, 0.4, 0.3]))
        shares = family.cdf(x, p)
        assert (np.diff(shares) >= 0).all(), family.name
        assert shares[0] == pytest.approx(0, abs=1e-3) and shares[-1] == pytest.approx(1, abs=1e-3), family.name
    assert set(NAMES) == {"auto", "empirical", *FAMILIES}


def test_scipy_is_loaded_when_something_is_fitted_and_not_before() -> None:
    program = (
        "import sys, aion.core.lateness.bound, aion.core.lateness.models, aion.core.lateness.estimate;"
        "import aion.core.lateness.change, policies.cleanup;"
        "print({m for m in sys.modules if m.split('.')[0] == 'scipy'} or 'none')"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("none", "")


def test_a_fit_takes_no_longer_for_a_longer_history() -> None:
    """Cells, not events, are what is fitted: as many for ten days as for one."""
    short, long = (learnt(lognormal(60), windows=n) for n in (1000, 10_000))
    assert len(long.edges_us) < 4 * len(short.edges_us)
    assert long.watched_us > 5 * DAY > short.watched_us
