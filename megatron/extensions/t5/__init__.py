"""T5: an encoder-decoder network, its objective and formats.

Needs: masked_lm.
"""
