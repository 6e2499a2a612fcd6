"""Detoxification: texts by a GPT, scored and filtered for toxicity.

Needs: corpora.
"""
