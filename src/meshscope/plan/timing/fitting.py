"""Fits a few constants to measured times, and layers to measured steps.

Constants: Nelder–Mead on their logarithms, the mean |ln(predicted/measured)|, each row's capped so
that outliers do not lead. Layers: for each hidden size, microbatch and tp, the factor on the
roofline that the median of its rows asks for; the step is nearly linear in it. Both are
deterministic. What is fitted is named; residuals stay what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshscope.plan.timing.calibration import Constants, LayerKey

Floats = npt.NDArray[np.float64]
Predict = Callable[[Constants], Floats]
"""Step times of all rows, in the unit of the measured ones."""
_CAP = 0.4
_PULL = 0.002
"""Of the squared distance to the start: constants that the rows say nothing of stay there."""


def fit_constants(
    predict: Predict,
    measured: Floats,
    start: Constants,
    names: Sequence[str],
    *,
    num_rounds: int = 300,
    cap: float = _CAP,
) -> Constants:
    """`start` with the named constants changed."""
    origin = np.log([getattr(start, name) for name in names])

    def make(point: Floats) -> Constants:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        return replace(start, **values)

    def lose(point: Floats) -> float:
        error = np.abs(np.log(predict(make(point)) / measured))
        pull = _PULL * float(np.mean((point - origin) ** 2))
        return float(np.mean(np.minimum(error, cap))) + pull

    return make(_minimise(lose, origin, num_rounds))


def _minimise(lose: Callable[[Floats], float], origin: Floats, num_rounds: int) -> Floats:
    """Nelder–Mead with its usual coefficients."""
    points = np.vstack([origin, origin + 0.3 * np.eye(len(origin))])
    losses = np.array([lose(point) for point in points])
    for _ in range(num_rounds):
        order = np.argsort(losses, kind="stable")
        points, losses = points[order], losses[order]
        centre = points[:-1].mean(axis=0)
        reflected = 2 * centre - points[-1]
        loss = lose(reflected)
        if loss < losses[0]:
            further = 3 * centre - 2 * points[-1]
            further_loss = lose(further)
            points[-1], losses[-1] = (
                (further, further_loss) if further_loss < loss else (reflected, loss)
            )
        elif loss < losses[-2]:
            points[-1], losses[-1] = reflected, loss
        else:
            inside = (centre + points[-1]) / 2
            inside_loss = lose(inside)
            if inside_loss < losses[-1]:
                points[-1], losses[-1] = inside, inside_loss
            else:
                points[1:] = (points[1:] + points[0]) / 2
                losses[1:] = [lose(point) for point in points[1:]]
    found: Floats = points[np.argmin(losses)]
    return found


def fit_layers(
    predict: Predict, measured: Floats, start: Constants, keys: Sequence[LayerKey], source: str
) -> Constants:
    """`start` with a factor for each kind of layer that a row has; rows are in `keys`' order."""
    known = dict.fromkeys(keys, 1.0)
    once = predict(start.with_layers(known, source))
    more = predict(start.with_layers(dict.fromkeys(keys, 1.5), source))
    slope = (more - once) / 0.5
    wanted = 1 + (measured - once) / slope
    ratios = {
        key: float(np.median([w for w, k in zip(wanted, keys, strict=True) if k == key]))
        for key in known
    }
    # A factor far from 1 says that something else than the layer is wrong.
    kept = {key: ratio for key, ratio in ratios.items() if 0.2 <= ratio <= 5}
    return start.with_layers(kept, source)
