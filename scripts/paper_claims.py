"""Prints what introductions to the Transformer claim, each claim with what is measured on this package's modules.

`python scripts/paper_claims.py` takes a few seconds and no data; the exit code is 1 where a claim does not hold.
The measurements are in `vanilla_transformer.paper_claims`.
"""

import argparse
import sys

from vanilla_transformer.paper_claims import CLAIMS, Claim, Figure, number
from vanilla_transformer_cli import while_read


def expected(figure: Figure) -> str:
    """What a figure should be, such as "< 0.01"."""
    return f"{figure.relation} {number(figure.expected)}"


def print_page(claim: Claim, figures: list[Figure]) -> None:
    """A claim and, on a line each, its figures as measured and as expected."""
    print(f"{claim.statement} (section {claim.section})")
    for figure in figures:
        verdict = "" if figure.holds else "   DOES NOT HOLD"
        print(f"  {figure.what:<56} {number(figure.measured):>13}   expected {expected(figure)}{verdict}")


def table_row(claim: Claim, figures: list[Figure]) -> str:
    """The claim as a row of the README's table, with the values that were compared with the measured ones."""
    values = "; ".join(f"{figure.what} {expected(figure)}" for figure in figures)
    return f"| {claim.statement} | {claim.section} | {values} |"


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns 0 if every claim holds, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--markdown", action="store_true", help="print the README's table instead of the page")
    markdown = parser.parse_args(argv).markdown
    if markdown:
        print("| claim | section | measured, and what it must be |\n| --- | --- | --- |")
    wrong = []
    for claim in CLAIMS:
        figures = claim.measure()
        wrong += [f"{claim.statement}: {figure.what}" for figure in figures if not figure.holds]
        if markdown:
            print(table_row(claim, figures))
        else:
            print_page(claim, figures)
    if not markdown and not wrong:
        print("Every claim holds.")
    for what in wrong:
        print(f"does not hold: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(while_read(main))
