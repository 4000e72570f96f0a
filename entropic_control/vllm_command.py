"""The command `vllm-args`. Light to import; the work is imported when run."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_commands(subparsers: Any) -> None:
    """Add the command to an argparse command line; it sets `run`, args to exit code."""
    command = subparsers.add_parser(
        "vllm-args",
        help="print what `vllm serve` must be given for a configuration",
        description=_vllm_args.__doc__,
    )
    command.add_argument("config", help="YAML or JSON file")
    command.add_argument(
        "--set", action="append", default=[], metavar="PART.KEY=VALUE", help="change a setting"
    )
    command.add_argument("--json", action="store_true", help="as the keyword arguments of vllm.LLM")
    command.set_defaults(run=_vllm_args)


def _vllm_args(args: argparse.Namespace) -> int:
    """Print the arguments for `vllm serve MODEL $(entropic vllm-args CONFIG)`."""
    from entropic_control.backends.vllm import arguments, serve_arguments
    from entropic_control.config import load_config

    config = load_config(args.config, settings=args.set)
    print(json.dumps(arguments(config), indent=2) if args.json else serve_arguments(config))
    return 0
