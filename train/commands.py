"""The typed entries of the commands for trained drafters, as in `inference.commands`."""

from typing import Literal

from data.dtypes import Dtype, StoreDtype


def export(
    ckpt: str,
    out: str,
    base: str | None = None,
    overwrite: bool = False,
    format: Literal["drafters", "vllm", "gguf"] = "drafters",
    mask_token_id: int | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    license: str | None = None,
    results: list[str] | None = None,
) -> None:
    """Turn a checkpoint into a folder with config.json, model.safetensors, SHA256SUMS and README.md, the model card.

    The folder is for `drafters eval --drafter ctc=OUT`. What was written is compared with the checkpoint, bit by bit.
    After `hf upload OWNER/NAME OUT .` others name it as OWNER/NAME@REVISION.

    Args:
        ckpt: Checkpoint of `lightning fit`, a file or DeepSpeed's folder; or the folder of a drafter.
        out: Folder to write.
        base: Folder or hub id of the base, if it is not the one of the training.
        overwrite: Replace a drafter in this folder.
        format: ``drafters``, or ``vllm`` for Medusa, EAGLE, EAGLE-3, and for Block and CTC as speculators' DSpark,
            or ``gguf``, which llama.cpp reads, for EAGLE-3, Block and CTC, whose blank is left out.
        mask_token_id: For Block and CTC in another format, a token that no text holds, whose embedding is replaced.
        dtype: Dtype of the weights; by default that of the training, and bfloat16 in another format.
        license: Licence for the card, such as apache-2.0. The base's licence may bind the drafter too.
        results: Folders that `drafters eval --out` wrote, whose tables go into the card.
    """
    from train import export

    export.export(ckpt, out, base, overwrite, format, mask_token_id, dtype, license, results)


def import_drafter(folder: str, out: str, base: str | None = None, overwrite: bool = False) -> None:
    """Read a drafter that another tool trained, so that it can be evaluated and exported here.

    EAGLE-3 is read in the formats of speculators, SpecForge, DeepSpec and EAGLE itself, EAGLE in that of EAGLE itself,
    DFlash and DSpark in those of speculators, SpecForge, DeepSpec and DFlash itself, and all but EAGLE in llama.cpp's.
    The drafter computes what it computed there; one that none here can compute is refused, with the difference.

    Args:
        folder: Folder of the drafter, with config.json and weights in safetensors; or a GGUF file.
        out: Folder to write.
        base: Folder or hub id of the base that it was trained for; by default the one that its config.json names.
        overwrite: Replace a drafter in this folder.
    """
    from train import import_drafter

    import_drafter.import_drafter(folder, out, base, overwrite)


def features(
    base: str,
    files: list[str],
    out: str,
    template: str = "tokenizer",
    max_length: int = 2048,
    limit: int | None = None,
    cache_dir: str | None = None,
    layers: str = "-1",
    dtype: StoreDtype = "float16",
    base_dtype: Dtype = "float32",
    device: str = "auto",
    devices: int = 1,
    batch_size: int = 8,
    shard_megabytes: float = 256.0,
    served: str | None = None,
    served_layers: str = "",
) -> None:
    """Write the base's hidden states and labels of conversations, for lightning fit --data.features OUT.

    The size of the store is printed first. A run that was interrupted continues with its first missing shard.

    Args:
        base: Folder or hub id of the base.
        files: Conversations, the same as data.files of the training.
        out: Folder of the store; an unfinished store of the same data in this folder is continued.
        template: Chat template, the same as data.template of the training.
        max_length: Maximum number of tokens of a conversation, the same as data.max_length of the training.
        limit: Maximum number of conversations to read; all if not given.
        cache_dir: Folder of the cache of tokenised conversations.
        layers: Base layers to store, like -1,2,5; 0 is the embedding and -1 the normed last hidden state, which losses
            that distil the base's distribution read.
        dtype: Dtype of the stored states; int8 stores a scale for each token and layer.
        base_dtype: Dtype that the base runs in, the same as model.base_dtype of the training; but a store that int8
            wrote on a CPU, by exact products of integers, is for a training with bfloat16.
        device: Device to run on: cpu, cuda, or auto, which uses the GPU if there is one.
        devices: Number of GPUs, or of processes on a CPU, that write shards at the same time.
        batch_size: Conversations per forward pass of the base.
        shard_megabytes: Size of a shard in megabytes.
        served: Folder of hs_*.safetensors that speculators' data_generation_offline.py wrote from a vLLM server: their
            states are stored, and of the base only the final norm and the LM head run. The default runs the base.
        served_layers: Layers in those files, in ascending order with the last one, like 2,16,29,32. The default is that
            of speculators' launch_vllm.py for a base of n layers: 2, n // 2, n - 3 and n.
    """
    from train import features

    features.features(
        base, files, out, template, max_length, limit, cache_dir, layers, dtype, base_dtype, device, devices,
        batch_size, shard_megabytes, served, served_layers,
    )  # fmt: skip


def show_mask(
    tokenizer: str, files: list[str], template: str = "tokenizer", max_length: int = 2048, limit: int = 2
) -> None:
    """Print conversations and show in green the tokens on which the loss is computed.

    Args:
        tokenizer: Folder or hub id of the base or of its tokenizer.
        files: Conversations, as data.files of a training, such as chats.json or embedded.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own, whose thinking switch
            tokenizer:thinking=on or tokenizer:thinking=off sets.
        max_length: Maximum number of tokens of a conversation; the rest is cut off.
        limit: Number of conversations to print.
    """
    from data import templates

    templates.show_mask(tokenizer, files, template, max_length, limit)
