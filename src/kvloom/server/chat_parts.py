"""What the bodies of chat requests are made of: messages, tools, formats of answers."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvloom.errors import RequestError
from kvloom.structured_outputs import StructuredOutputs


class StrictModel(BaseModel):
    """Takes JSON's types as they are."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(StrictModel):
    """What the model called: `arguments` is a JSON object as a text."""

    name: str
    arguments: str

    @property
    def decoded(self) -> Any:
        """The arguments as an object, as chat templates expect them."""
        return json.loads(self.arguments)

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError("it is not a JSON object written as a text")
        return text


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictModel):
    """One message of a conversation. `refusal` is only there so that answers may be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know messages."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": call.function.decoded},
                }
                for call in self.tool_calls
            ]
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        return message


class FunctionDefinition(StrictModel):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="arguments as in `parameters`, which calls that are forced have anyway"
    )


class Tool(StrictModel):
    """A tool the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class JsonSchemaFormat(StrictModel):
    """A JSON schema; answers keep to it whether it is called strict or not."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise RequestError(
                "response_format.json_schema", "it is there if type is json_schema, and only then"
            )
        return self

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """As the engine knows it."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class NamedFunction(StrictModel):
    """The name of one of the tools."""

    name: str


class NamedTool(StrictModel):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction
