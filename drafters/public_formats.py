"""Parts of the configurations in which other projects keep drafters, as far as they are read here.

Every field may be left out of a folder, and is None then.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeculatorsProposal:
    """An entry of ``proposal_methods`` in speculators: how many tokens it drafts."""

    speculative_tokens: int | None = None


@dataclass(frozen=True)
class SpeculatorsBase:
    """The part ``verifier`` of speculators: the base."""

    name_or_path: str | None = None


@dataclass(frozen=True)
class SpeculatorsConfig:
    """The part ``speculators_config``."""

    verifier: SpeculatorsBase = SpeculatorsBase()
    proposal_methods: tuple[SpeculatorsProposal, ...] = ()

    @property
    def num_tokens(self) -> int | None:
        """The tokens of a draft, if the first proposal says so."""
        return self.proposal_methods[0].speculative_tokens if self.proposal_methods else None


@dataclass(frozen=True)
class SpecForgeLayers:
    """The part ``eagle_config`` of SpecForge: the fused layers of the base, counted from 0."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    use_aux_hidden_state: bool = True
