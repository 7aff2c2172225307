"""Drafters that run one decoder layer once per draft depth: EAGLE and EAGLE-3."""
