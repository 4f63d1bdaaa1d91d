"""Published chat templates, shortened to their branches for tool calls and for the contents of messages."""

from __future__ import annotations

from dataclasses import dataclass

_QWEN2_5 = """\
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
_QWEN3 = """\
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + reasoning_content + content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}"""
_LLAMA3_1 = """\
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}
        {{- "}" }}{{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}"""
_MISTRAL_V3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}{{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
_MISTRAL_V11 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if (message['content'] is not defined or message['content'] is none or message['content']|length == 0)
            and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
            {{- raise_exception('Assistant message must have a content or tool calls.') }}
        {%- endif %}
        {%- if message['content'] is defined and message['content'] is not none and message['content']|length > 0 %}
            {%- if message['content'] is string %}{{- message['content'] }}
            {%- else %}{%- for block in message['content'] %}{{- block['text'] }}{%- endfor %}{%- endif %}
        {%- endif %}
        {%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}
            {%- for tool in message['tool_calls'] %}
                {{- '[TOOL_CALLS]' }}
                {%- set name = tool['function']['name'] %}
                {%- set arguments = tool['function']['arguments'] %}
                {%- if arguments is not string %}{%- set arguments = arguments|tojson|safe %}
                {%- elif arguments == '' %}{%- set arguments = '{}' %}{%- endif %}
                {{- name + '[ARGS]' + arguments }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + message['content']|string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
_HERMES = """\
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{' }}{{- '"name": "' }}{{- tool_call.name }}{{- '"' }}
            {%- if tool_call.arguments is defined %}
                {{- ', "arguments": ' }}{{- tool_call.arguments|tojson }}
            {%- endif %}
            {{- '}' }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
_GRANITE3 = """\
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}
    {%- if message.tool_calls %}{{- '<|tool_call|>' }}{%- for call in message.tool_calls %}{{- call.function | tojson }}
    {%- endfor %}{%- endif %}
    {{- message['content'] + '<|end_of_text|>\\n' }}
{%- endfor %}"""
_DEEPSEEK_V3 = (
    "{% set ns = namespace(is_first=false, is_tool=false) %}{{bos_token}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"  # noqa: RUF001
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_tool = false -%}"
    "{%- for tool in message['tool_calls']%}{%- if not ns.is_first %}{{'<｜tool▁calls▁begin｜>'}}"  # noqa: RUF001
    "{%- set ns.is_first = true -%}{%- endif %}{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "  # noqa: RUF001
    "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + "
    "'<｜tool▁call▁end｜>'}}{%- endfor %}{%- endif %}"  # noqa: RUF001
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}"  # noqa: RUF001
    "{%- if message['role'] == 'tool' %}{{'<｜tool▁output▁begin｜>' + message['content']}}{%- endif %}{%- endfor -%}"  # noqa: RUF001
)
_PHI4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not "
    "none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + "
    "'<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
_GPT_OSS = """\
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if "content" in message %}
            {%- if "<|channel|>analysis<|message|>" in message.content %}
                {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
            {%- endif %}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.content and message.thinking %}{{- raise_exception("Cannot pass both.") }}
            {%- elif message.content %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson }}{{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("No previous tool call!") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|message|>" + message.content|tojson }}
    {%- else -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{{- reasoning_effort if reasoning_effort is defined else "medium" }}"""
_SMOLLM2 = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
)
_SMOLLM3 = """\
{%- for message in messages %}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "assistant" %}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- else %}{{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True, slots=True)
class Published:
    """A template, and the form in which it takes what OpenAI's clients send.

    Attributes:
        content: the content of a message whose content is null.
        are_texts: whether the arguments of a call are JSON text.
    """

    source: str
    content: str | None = ""
    are_texts: bool = False


PUBLISHED = {
    "Qwen2.5": Published(_QWEN2_5),
    "Qwen3": Published(_QWEN3, None),
    "Llama-3.1": Published(_LLAMA3_1),
    "Mistral-v3": Published(_MISTRAL_V3),
    "Mistral-v11": Published(_MISTRAL_V11, None),
    "Hermes-3": Published(_HERMES),
    "Granite-3": Published(_GRANITE3),
    "DeepSeek-V3": Published(_DEEPSEEK_V3, None, are_texts=True),
    "Phi-4-mini": Published(_PHI4_MINI),
    "gpt-oss": Published(_GPT_OSS),
    "SmolLM2": Published(_SMOLLM2),
    "SmolLM3": Published(_SMOLLM3, None),
}
