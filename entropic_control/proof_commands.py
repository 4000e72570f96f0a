"""Commands of the proofs: certify, identify, tune. Light to import; the work is imported when run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_commands(subparsers: Any) -> None:
    """Add the commands to an argparse command line; each sets `run`, args to exit code."""
    certify = subparsers.add_parser(
        "certify", help="prove a configuration's stability and bounds", description=_certify.__doc__
    )
    certify.add_argument("config", help="YAML or JSON file")
    certify.add_argument(
        "--delay", type=int, help="tokens from measurement to effect; by default the backend's"
    )
    certify.add_argument("--vocab", type=int, help="tokens of the vocabulary")
    certify.add_argument("--trace", type=Path, metavar="RUN_DIR", help="check assumptions on a run")
    certify.add_argument(
        "--trials", type=int, default=0, help="random and adversarial cases to try on each claim"
    )
    certify.add_argument(
        "--smt", type=Path, metavar="FILE", help="write a certificate for an SMT solver, such as z3"
    )
    certify.add_argument("--json", action="store_true")
    certify.set_defaults(run=_certify)

    identify = subparsers.add_parser(
        "identify",
        help="find how a run's entropy answers to temperature",
        description=_identify.__doc__,
    )
    identify.add_argument("directory", type=Path, metavar="RUN_DIR")
    identify.add_argument("--json", action="store_true")
    identify.set_defaults(run=_identify)

    tune = subparsers.add_parser(
        "tune", help="find gains for a run's plant", description=_tune.__doc__
    )
    tune.add_argument("directory", type=Path, metavar="RUN_DIR")
    tune.add_argument(
        "--target", type=float, help="entropy to hold, nats; by default the run's own mean"
    )
    tune.add_argument("--gm", type=float, default=6.0, help="least gain margin, dB")
    tune.add_argument("--pm", type=float, default=60.0, help="least phase margin, degrees")
    tune.add_argument(
        "--wander", type=float, default=0.2, help="largest standard deviation of ln T"
    )
    tune.add_argument("--delay", type=int, default=1, help="tokens from measurement to effect")
    tune.add_argument("--json", action="store_true")
    tune.set_defaults(run=_tune)


def _certify(args: argparse.Namespace) -> int:
    """Prove a configuration; exits with 0 when every claim holds and 1 when one fails."""
    from entropic_control.certification import certify

    certificate = certify(
        args.config,
        delay=args.delay,
        vocab=args.vocab,
        trace=args.trace,
        trials=args.trials,
    )
    if args.smt:
        from entropic_control.proofs.exactgain import smt_of

        args.smt.write_text(smt_of(certificate.claims), encoding="utf-8")
    print(certificate.to_json() if args.json else certificate)
    return 0 if certificate.holds else 1


def _identify(args: argparse.Namespace) -> int:
    """Fit the plant to a run: slope of the entropy in ln T, its confidence, the text's noise."""
    from entropic_control.proofs.identify import identify

    plant = identify(args.directory)
    print(json.dumps(plant.to_dict(), indent=2) if args.json else plant)
    return 0


def _tune(args: argparse.Namespace) -> int:
    """Find the quietest gains with the margins asked for, as a `temperature` part to paste."""
    import yaml

    from entropic_control.proofs.design import design, expected
    from entropic_control.proofs.identify import identify

    plant = identify(args.directory)
    target = round(plant.entropy, 2) if args.target is None else args.target
    tuned = design(plant, target, args.gm, args.pm, wander=args.wander, delay=args.delay)
    found, spread = expected(tuned, plant, args.delay)
    part = tuned.model_dump(mode="json")
    if args.json:
        promised = {
            "gain_margin_db": found.gain_margin_db,
            "phase_margin": found.phase_margin,
            "delay_margin": found.delay_margin,
            "std_entropy": spread.entropy,
            "std_log_temperature": spread.log_temperature,
        }
        print(json.dumps({"temperature": part, "expected": promised}, indent=2))
        return 0
    print(f"# {found}")
    print(f"# std of F[H] {spread.entropy:.3g} nats, of ln T {spread.log_temperature:.3g}")
    print(yaml.safe_dump({"temperature": part}, sort_keys=False), end="")
    return 0
