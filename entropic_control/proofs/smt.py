"""A certificate as a question for an outside checker: SMT-LIB 2, logic QF_NRA.

The text asserts that the claim is false: that some token, among all slopes and divisors of the range, lets
x' P x stay or grow. A solver that answers `unsat` has proven the claim without any code of this package.
"""

from __future__ import annotations

from fractions import Fraction

from entropic_control.controllers import PITemperature
from entropic_control.proofs.rational import Exact, exact_token


def decrease_query(
    controller: PITemperature,
    delay: int,
    P: Exact,
    low: Fraction | float,
    high: Fraction | float,
    shares: tuple[Fraction, Fraction],
) -> str:
    """The negation of "x' P x falls at every token" for all slopes and proportional gains of a range.

    Parameters
    ----------
    controller : PITemperature
        Its matrices enter exactly, from `exact_token`.
    delay : int
        Tokens; solvers answer at once at 1, and may give up on more.
    P : array of fractions, shape (n, n)
        The certificate.
    low, high : number
        Slopes of the entropy, nats; a `low` of 0 is left out, because nothing moves x there.
    shares : (Fraction, Fraction)
        Least and largest kp over the divisor, 1/nats.

    Returns
    -------
    str
        SMT-LIB 2, `unsat` where the certificate is right.
    """
    n = len(P)
    x, y = [f"x{i}" for i in range(n)], [f"y{i}" for i in range(n)]
    # A is affine in the slope g, the share q and their product r.
    rest, slope, share, both = (exact_token(controller, delay, g, q) for g, q in _UNITS)
    parts = {"": rest, "g": slope - rest, "q": share - rest, "r": both - slope - share + rest}
    least, most = (_number(q) for q in shares)
    lines = [
        f"; {controller.kind}: kp {controller.kp}, ki {controller.ki}, filter {controller.filter}; "
        f"delay {delay}",
        "; g: slope of the entropy in ln T, nats. q: kp over the divisor. r = g q.",
        "; x: F[H] - H*, I - u*, then the commands on their way, as deviations. y: one token later.",
        "; unsat: x' P x falls at every token with g and q in these ranges.",
        "(set-logic QF_NRA)",
        *(f"(declare-const {name} Real)" for name in (*x, *y, "g", "r")),
        f"(assert ({'<' if low == 0 else '<='} {_number(low)} g))",
        f"(assert (<= g {_number(high)}))",
        f"(assert (<= (* g {least}) r (* g {most})))",
    ]
    if parts["q"].any():
        lines += [
            "(declare-const q Real)",
            f"(assert (<= {least} q {most}))",
            "(assert (= r (* g q)))",
        ]
    for i, name in enumerate(y):
        lines.append(f"(assert (= {name} {_row(parts, i, x)}))")
    # x' P x is homogeneous, so the first entry that is not 0 may be taken to be 1.
    rays = [
        f"(and {' '.join([f'(= {name} 0)' for name in x[:i]] + [f'(= {x[i]} 1)'])})"
        for i in range(n)
    ]
    lines.append(f"(assert {_many('or', rays)})")
    lines.append(f"(assert (>= {_form(P, y)} {_form(P, x)}))")
    return "\n".join([*lines, "(check-sat)", ""])


_UNITS = ((0, 0), (1, 0), (0, 1), (1, 1))


def _row(parts: dict[str, Exact], i: int, x: list[str]) -> str:
    terms = [
        f"(* {_number(A[i, j])} {f'{name} ' if name else ''}{x[j]})"
        for name, A in parts.items()
        for j in range(len(x))
        if A[i, j]
    ]
    return _many("+", terms)


def _form(P: Exact, names: list[str]) -> str:
    n = len(names)
    terms = [
        f"(* {_number(P[i, j])} {names[i]} {names[j]})"
        for i in range(n)
        for j in range(n)
        if P[i, j]
    ]
    return _many("+", terms)


def _many(operator: str, terms: list[str]) -> str:
    if not terms:
        return "0.0"
    return terms[0] if len(terms) == 1 else f"({operator} {' '.join(terms)})"


def _number(value: Fraction | float) -> str:
    exactly = Fraction(value)
    size = f"(/ {abs(exactly.numerator)}.0 {exactly.denominator}.0)"
    return size if exactly >= 0 else f"(- {size})"
