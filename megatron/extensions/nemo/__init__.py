"""NeMo's formats: `.nemo` archives, and YAML flags of its labelled tasks.

Needs: tasks.
"""
