"""Whether one rank stands out more often than by chance.

If ranks were alike, each would be the largest of N in a step with probability 1/N, so how often
one is the largest in n steps is binomial. A count is beyond chance when its upper tail, times the
number of counts tested (Bonferroni), is below one per cent. Steps are taken as independent: a
disturbance that lasts for many steps looks less like chance than it is.
"""

import math

SIGNIFICANCE_RATIO = 0.01
"""How often a healthy run may be called unhealthy, over all its ranks."""
MIN_STEPS = 10
"""With fewer steps nothing stands out."""
LEAD_FLOOR = 0.1
"""The least chance that is believed of one step's lead."""


def binomial_tail(count: int, num_trials: int, probability: float) -> float:
    """The chance of at least `count` successes in `num_trials`, each with `probability`."""
    if count <= 0:
        return 1.0
    if count > num_trials or probability <= 0:
        return 0.0
    if probability >= 1:
        return 1.0
    log_term = (
        math.lgamma(num_trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(num_trials - count + 1)
        + count * math.log(probability)
        + (num_trials - count) * math.log1p(-probability)
    )
    odds = probability / (1 - probability)
    # Terms relative to the first one: each follows from the one before.
    term, total = 1.0, 1.0
    for successes in range(count, num_trials):
        growth = (num_trials - successes) / (successes + 1) * odds
        term *= growth
        total += term
        if growth < 1 and term < total * 1e-17:
            break
    return min(1.0, math.exp(log_term + math.log(total)))


def student_tail(t_value: float, freedom: int) -> float:
    """The chance of at least `t_value` of Student's t with so many degrees of freedom.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t_value, math.sqrt(freedom))
    cosine = math.cos(angle) ** 2
    is_odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if is_odd else (1.0, 0.0)
    for index in range(is_odd, freedom - 1, 2):
        total += term
        term *= cosine * (index + 1) / (index + 2)
    inside = math.sin(angle) * total
    if is_odd:
        inside = 2 / math.pi * (angle + inside)
    return min(1.0, max(0.0, (1 - inside) / 2))


def lead_chance(lead: float, spread: float, num_ranks: int) -> float:
    """The chance that the largest of `num_ranks` leads the next by `lead` or more, if the others
    are within `spread`.

    For exponential noise, whose tail is long: the gaps between values in order are independent,
    that below the i-th largest with the rate i, so it is the product of i / (i + lead / spread)
    for i from 2 to num_ranks - 1. At least LEAD_FLOOR: a few values do not show the noise's tail.
    """
    if spread <= 0:
        return LEAD_FLOOR if num_ranks > 2 else 1.0
    factor = max(lead, 0.0) / spread
    chance = math.prod(i / (i + factor) for i in range(2, num_ranks))
    return max(chance, LEAD_FLOOR)


def is_beyond_chance(count: int, *, num_steps: int, num_ranks: int, num_tests: int) -> bool:
    """Whether `count` times the largest of `num_ranks` in `num_steps` is no accident."""
    if num_steps < MIN_STEPS or num_ranks < 2 or count * num_ranks <= num_steps:
        return False
    return binomial_tail(count, num_steps, 1 / num_ranks) * num_tests < SIGNIFICANCE_RATIO


def bound_share(ratio: float, count: int) -> tuple[float, float]:
    """The 95 % interval (Wilson) of a share that was seen in so many."""
    z = 1.96
    middle, scale = ratio + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(ratio * (1 - ratio) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
