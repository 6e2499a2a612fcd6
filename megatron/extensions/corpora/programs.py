"""Sections of flags of the programs of corpora."""

from collections.abc import Mapping

from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.plugins import PluginModulesConfig
from megatron.config.run.urls import UrlConfig
from megatron.config.tools.preprocess import PreprocessConfig
from megatron.extensions.corpora.flags import CleaningConfig
from megatron.extensions.corpora.flags_fetch import FetchConfig, PublishedConfig, WikipediaConfig

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "tools/corpora/clean.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        CleaningConfig,
    ),
    "tools/corpora/wikipedia.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
        WikipediaConfig,
    ),
    "tools/corpora/published.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
        PublishedConfig,
    ),
    "tools/corpora/fetch.py": (FetchConfig,),
}
