"""Proofs: certificates, margins, identification and design for the controllers, from their own code."""

from entropic_control.proofs.certify import certify
from entropic_control.proofs.claim import Assumption, Certificate, Claim
from entropic_control.proofs.design import design, expected
from entropic_control.proofs.identify import Plant, identify
from entropic_control.proofs.loop import Loop, open_loop, state_space
from entropic_control.proofs.margins import Margins, loop_margins, margins
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim

__all__ = [
    "Assumption",
    "Certificate",
    "Claim",
    "Loop",
    "Margins",
    "Plant",
    "Subject",
    "certify",
    "claim",
    "design",
    "expected",
    "identify",
    "loop_margins",
    "margins",
    "open_loop",
    "state_space",
]
