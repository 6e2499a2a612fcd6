#!/usr/bin/env python
"""Let transformers continue a prompt greedily, and compare with what the trained network wrote."""

import sys
from argparse import ArgumentParser
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print transformers' words; leave with 1 when they are others."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder that to_hf.py wrote")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, required=True, help="how many tokens to add")
    parser.add_argument(
        "--expected", type=Path, required=True, help="what generate_samples_gpt.py --greedy wrote"
    )
    args = parser.parse_args()

    options = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(args.model, **options)
    model = AutoModelForCausalLM.from_pretrained(args.model, **options)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    (row,) = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
    words = tokenizer.decode(row[inputs["input_ids"].size(1) :], skip_special_tokens=True)
    print(args.prompt + words)
    expected = args.expected.read_text(encoding="utf-8")
    if f"Megatron-LM:\n{words}\n\n" not in expected:
        sys.exit(f"error: the trained network wrote something else:\n{expected}")
    print(f"{args.tokens} tokens at most, the same as those of the trained network")


if __name__ == "__main__":
    main()
