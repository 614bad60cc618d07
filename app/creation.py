"""From a Modelfile to a model of its own: reads it, checks it against its base, registers it.

What a chat would only find out later is refused here: values out of range, a template that is no Jinja,
messages that the template rejects.  Called by `quire create`.
"""

from __future__ import annotations

from pathlib import Path

from engine.api.errors import BrokenCheckpoint, EngineError, InvalidParameter
from engine.api.sampling import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.stage import open_text_files
from store.errors import InvalidModelfile
from store.facts import read_model_facts
from store.models import InstalledModel, ModelStore
from store.names import parse_model_name
from store.presets.derive import create_model
from store.presets.modelfile import MAX_MODELFILE_BYTES, Modelfile, parameter_name, parse_modelfile
from store.presets.preset import Preset

_LEAST_CONTEXT = 2
"""A token of the prompt and one of the answer."""


def read_modelfile(path: Path) -> Modelfile:
    """Read a Modelfile; a FROM that names files beside it becomes their whole path.

    Raises InvalidModelfile.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MODELFILE_BYTES + 1)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise InvalidModelfile(f"There is no Modelfile at {path}; name it with `quire create NAME -f FILE`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModelfile(f"{path} cannot be read as a Modelfile ({error}); give a text file in UTF-8.") from error
    if len(content) > MAX_MODELFILE_BYTES:
        raise InvalidModelfile(f"{path} is larger than 1 MiB and so no Modelfile; give a text file.")
    modelfile = parse_modelfile(text)
    return Modelfile(_located(modelfile.base, path.absolute().parent), modelfile.preset)


def _located(base: str, folder: Path) -> str:
    beside = folder / Path(base).expanduser()
    try:
        if beside.is_file() or (beside / "config.json").is_file():
            return str(beside)
    except (OSError, ValueError):
        pass
    name = parse_model_name(base)
    return str(beside) if name.kind == "path" else name.text


def create(store: ModelStore, name: str, modelfile: Modelfile) -> InstalledModel:
    """Register the model that a Modelfile describes; its base is installed.

    Raises InvalidModelfile and whatever `store.presets.derive.create_model` does.
    """
    base = store.find(modelfile.base)
    check_preset(modelfile.preset.over(base.preset), base.path)
    return create_model(store, modelfile.base, name, modelfile.preset)


def check_preset(preset: Preset, model: Path) -> None:
    """Whether the engine can do what a preset says with the model at `model`.  Raises InvalidModelfile."""
    try:
        SamplingParams(**preset.parameters.sampling()).validate()
    except InvalidParameter as error:
        name = parameter_name(error.param or "")
        raise InvalidModelfile(f"The parameter {name} of the Modelfile is out of range: {error.message}") from error
    _check_context(preset, model)
    if preset.template is not None or preset.system or preset.messages:
        _check_conversation(preset, model)


def _check_context(preset: Preset, model: Path) -> None:
    wanted = preset.parameters.context_length
    trained = read_model_facts(model).context_length
    if wanted is not None and not _LEAST_CONTEXT <= wanted <= (trained or wanted):
        raise InvalidModelfile(
            f"The parameter num_ctx of the Modelfile is {wanted:,}, but this model takes {_LEAST_CONTEXT} to "
            f"{trained or 0:,} tokens; change it or leave it out."
        )


def _check_conversation(preset: Preset, model: Path) -> None:
    """Render what a chat would begin with: some templates know no system role, or want roles to alternate."""
    tokenizer, template = open_text_files(model)
    try:
        if preset.template is not None:
            template = ChatTemplate(preset.template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    except BrokenCheckpoint as error:
        raise InvalidModelfile(f"The TEMPLATE of the Modelfile is not usable: {error.__cause__ or error}.") from error
    if template is None:
        raise InvalidModelfile(
            "This model has no chat template, so SYSTEM and MESSAGE would have no effect; add a TEMPLATE in Jinja."
        )
    question = {"role": "user", "content": "Hello"}
    try:
        template.render(preset.opening((question,)))
    except EngineError as error:
        raise InvalidModelfile(f"A chat could not begin as the Modelfile says: {error.message}") from error
