"""Base classes and field types of request and response bodies (pydantic)."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from megatron.tokenizer.types.tokenizer import has_half_a_surrogate_pair

JsonSchema = dict[str, Any]


def require_characters(text: str) -> str:
    """Return `text`; raise ValueError if it has half of a surrogate pair."""
    if has_half_a_surrogate_pair(text):
        raise ValueError("half of a surrogate pair is not a character")
    return text


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses a longer list or object before each item is validated."""

    def require_few(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"give at most {most}, not {len(value)}")
        return value

    return BeforeValidator(require_few)


Text = Annotated[str, AfterValidator(require_characters)]
"""A string that UTF-8 can write."""

Texts = Annotated[list[Text], FailFast(), Field(min_length=1)]
"""At least one text; the first that is none ends the validation."""

SEED_LIMIT = 1 << 63

_MOST_UNKNOWN = 20
"""Unknown fields that are reported."""


def refuse_field(reason: str) -> BeforeValidator:
    """Return a validator for an unsupported field of other servers, refused with `reason`."""

    def refuse(value: Any) -> Any:
        raise ValueError(f"{reason}; leave it out")

    return BeforeValidator(refuse)


def only(accepted: Any, reason: str) -> BeforeValidator:
    """Return a validator that accepts one value of a field, or refuses it with `reason`."""

    def validate(value: Any) -> Any:
        if value != accepted or type(value) is not type(accepted):
            raise ValueError(f"{reason}; leave it out")
        return value

    return BeforeValidator(validate)


def _let_optional_fields_be_null(schema: JsonSchema) -> None:
    fields = schema.get("properties", {})
    for name, field in fields.items():
        if name not in schema.get("required", []) and not _may_be_null(field):
            title = {"title": field.pop("title")} if "title" in field else {}
            fields[name] = {**title, "anyOf": [field, {"type": "null"}]}


def _may_be_null(field: JsonSchema) -> bool:
    return field.get("type") == "null" or any(map(_may_be_null, field.get("anyOf", [])))


class Body(BaseModel):
    """A JSON object. A field that is null counts as left out, unless it is required."""

    # Strict: true and "1" are not numbers; an integer is accepted as a float.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        unreported = {*[key for key in body if key not in cls.model_fields][_MOST_UNKNOWN:]}
        return {
            key: value
            for key, value in body.items()
            if (value is not None or key not in optional) and key not in unreported
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchema:
        """Return the JSON schema, in which every optional field may be null."""
        schema = handler(core)
        _let_optional_fields_be_null(handler.resolve_ref_schema(schema))
        return schema


class Answer(BaseModel):
    """A JSON object in a response."""

    model_config = ConfigDict(extra="forbid")


class ErrorAnswer(Answer):
    """Error of PUT /api."""

    error: str


class HealthAnswer(Answer):
    """State of the server."""

    status: Literal["ok", "closing", "failed"]
