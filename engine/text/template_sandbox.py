"""The Jinja environment that chat templates run in.

No attributes of Python's internals, no way to change data, no files, and a bounded amount of work
and text (`template_budget`). A template is untrusted: it comes with a model file or a request. Jinja's sandbox stops escapes;
loops, growing text and deep structures are stopped here. Knows no chat.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from jinja2 import ChainableUndefined, Template, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from engine.errors import TemplateError
from engine.text.template_budget import Budget
from engine.text.template_filters import (
    before,
    bounded_filters,
    bounded_tests,
    check_format,
    materialize,
    pay_method,
    pay_outside,
    percent,
    printed,
)

# The largest templates in use need about a fifth of each.
_MAX_SOURCE_CHARS = 64 << 10
_MAX_SOURCE_NODES = 8_000

# Python's frames and Jinja's argument handling for one call.
_STEPS_PER_MACRO = 8
_SCOPES = ("_loop_vars", "_block_vars")

# Names that no template can spell, for what the tree is rewritten to use.
_ITERATE, _CONCAT, _SLICE, _READ = "bound:iterate", "bound:concat", "bound:slice", "bound:read"


class TemplateSandbox:
    """Compiles templates and runs them. Threads may share it; a rendering has its own budget.

    Templates can call `global_functions`, which pay nothing. `watch` is shown every value that a
    filter ("tojson") or a test ("is string") is used on, and returns the value to use it on.
    """

    def __init__(
        self,
        global_functions: Mapping[str, Callable[..., Any]],
        watch: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self._environment = _Environment()
        if watch is not None:
            self._environment.watch(watch)
        self._environment.globals.update(
            {name: _Trusted(function) for name, function in global_functions.items()}
        )

    def compile(self, source: str) -> Template:
        """Compiles a template.

        Raises:
            TemplateError: the source is too long, no template, or uses another file.
        """
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateError(
                f"{len(source)} characters are more than the {_MAX_SOURCE_CHARS} allowed"
            )
        environment = self._environment
        try:
            tree = environment.parse(source)
            _check_size(tree)
            tree = _Bounding().visit(tree)
            code = environment.compile(cast(nodes.Template, tree))
            return Template.from_code(environment, code, environment.globals)
        except TemplateError:
            raise
        except Exception as error:
            # Whatever a hostile source makes the parser or Python's compiler raise.
            raise TemplateError(_cause(error)) from error

    def names_of(self, source: str) -> set[str]:
        """Returns the variables that a template takes from outside."""
        return meta.find_undeclared_variables(self._environment.parse(source))

    def run(self, template: Template, variables: Mapping[str, object], budget: Budget) -> str:
        """Renders a template on a budget. It may change lists that the variables hold.

        Raises:
            TemplateError: the template fails, refuses its input, or needs more than its budget.
        """
        with self._environment.spending(budget):
            try:
                # Not Template.render(): on errors that compiles code to show template lines.
                context = template.new_context(dict(variables))
                return "".join(template.root_render_func(context))
            except TemplateError:
                raise
            except Exception as error:
                # The template's own failures come as any exception that its operators raise.
                raise TemplateError(_cause(error)) from error


def _check_size(tree: nodes.Template) -> None:
    num_nodes = sum(1 for _ in tree.find_all(nodes.Node))
    if num_nodes > _MAX_SOURCE_NODES:
        raise TemplateError(
            f"{num_nodes} expressions and statements are more than the {_MAX_SOURCE_NODES} allowed"
        )


def _cause(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(error) or type(error).__name__


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=ChainableUndefined,
            extensions=[LoopControlExtension, _GenerationBlock],
            finalize=_finalize,
            # Folding constants would do unpaid work, and while compiling.
            optimized=False,
            cache_size=0,
        )
        self._local = threading.local()
        self.filters = {**bounded_filters(self.budget), **self._rewritten()}
        self.tests = bounded_tests(self.budget)
        self.globals = {"range": _Trusted(self._range), "dict": dict, "namespace": Namespace}

    def budget(self) -> Budget:
        """Returns the budget of the rendering that this thread runs."""
        return self._local.budget

    @contextmanager
    def spending(self, budget: Budget) -> Generator[None]:
        outer = getattr(self._local, "budget", None)
        self._local.budget = budget
        try:
            yield
        finally:
            self._local.budget = outer

    def watch(self, watch: Callable[[str, Any], Any]) -> None:
        """Shows the values of all later uses of filters and tests."""
        for prefix, functions in (("", self.filters), ("is ", self.tests)):
            for name, function in functions.items():
                functions[name] = before(function, partial(_watch_first, watch, prefix + name))

    def _rewritten(self) -> dict[str, Callable[..., Any]]:
        def read(value: object) -> object:
            self.budget().read(value)
            return value

        def concat(values: list[object]) -> str:
            texts = [printed(self.budget(), _as_text(value)) for value in values]
            self.budget().write(sum(map(len, texts)))
            return "".join(texts)

        def take_slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
            part = slice(start, stop, step)
            if isinstance(value, (str, list, tuple, range)):
                size = len(range(*part.indices(len(cast("list[object]", value)))))
                pay = self.budget().write if isinstance(value, str) else self.budget().step
                pay(size)
            return cast(Any, value)[part]

        def iterate(value: Any) -> list[Any]:
            return materialize(self.budget(), value)

        return {
            _ITERATE: iterate,
            _CONCAT: concat,
            _SLICE: take_slice,
            _READ: read,
        }

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.budget().step(len(numbers))
        return numbers

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget().step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget().read(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Lists may grow and shrink, as in llama.cpp: the values of a rendering are its own.
        if isinstance(obj, list) and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ != "format":
            raise TemplateError("str.format_map() is not available")

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(self.budget(), value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return _Trusted(bounded)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget()
        budget.step()
        if operator == "%" and isinstance(left, str):
            return percent(budget, left, right)
        if operator == "+":
            if isinstance(left, str) != isinstance(right, str):
                left, right = _as_text(left), _as_text(right)
            _pay_sum(budget, left, right)
        elif operator == "*":
            _pay_product(budget, left, right)
        elif operator == "**":
            _pay_power(budget, left, right)
        return super().call_binop(context, operator, left, right)

    # Jinja's own name for the first parameter keeps keyword arguments of templates apart.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget()
        budget.step()
        # Jinja passes the variables of loops and blocks along, for functions that take a context.
        given = (*args, *(value for name, value in kwargs.items() if name not in _SCOPES))
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext):
            for value in given:
                pay_outside(budget, value)
        elif __obj in (dict, Namespace):
            budget.step(len(given))
        elif isinstance(owner, LoopContext) or isinstance(__obj, _Trusted):
            budget.read(*given)
        elif isinstance(__obj, (types.BuiltinMethodType, types.MethodType)):
            pay_method(budget, owner, __obj.__name__, given)
        elif isinstance(__obj, (Macro, BlockReference)):
            budget.step(_STEPS_PER_MACRO)
        elif not isinstance(__obj, Undefined):
            raise SecurityError(f"{type(__obj).__name__} cannot be called")
        return super().call(__context, __obj, *args, **kwargs)


def _watch_first(watch: Callable[[str, Any], Any], name: str, *values: Any) -> tuple[Any, ...]:
    return (watch(name, values[0]), *values[1:]) if values else values


class _Trusted:
    """A function of ours that pays for itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@pass_context
def _finalize(context: Context, value: object) -> str:
    """Pays for what a template prints. With the context, so that nothing is folded before."""
    budget = cast(_Environment, context.environment).budget()
    text = printed(budget, value)
    budget.write(len(text))
    return text


def _as_text(value: Any) -> Any:
    """What text plus a value adds: nothing for what is missing, and numbers as they print.

    Source: llama.cpp's engine. Jinja refuses this, and templates that were tried on one only
    may need either.
    """
    if value is None or isinstance(value, Undefined):
        return ""
    return str(value) if isinstance(value, (int, float)) else value


def _pay_sum(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget.write(len(left) + len(right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.step(len(cast("list[Any]", left)) + len(cast("list[Any]", right)))


def _pay_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        budget.check_integer(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            budget.repeat(cast("str | list[object]", value), count)


def _pay_power(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        budget.check_integer(left.bit_length() * abs(right))


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a trainer masks; it prints its content and means no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounding(NodeTransformer):
    """Rewrites what Jinja compiles to bare Python into filters that pay."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(_ITERATE, cast(nodes.Expr, node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        nothing = nodes.Const(None, lineno=node.lineno)
        return _filter(_SLICE, node.node, [bound or nothing for bound in bounds])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _reading(node.expr)
        for operand in node.ops:
            operand.expr = _reading(operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _reading(pair.key)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # As a constant it passes through finalize, and so is paid for each time it is printed.
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Include(self, node: nodes.Include) -> nodes.Node:
        return _refuse(node)

    def visit_Import(self, node: nodes.Import) -> nodes.Node:
        return _refuse(node)

    def visit_FromImport(self, node: nodes.FromImport) -> nodes.Node:
        return _refuse(node)

    def visit_Extends(self, node: nodes.Extends) -> nodes.Node:
        return _refuse(node)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateError(f"line {node.lineno}: prompts are not escaped")


def _filter(name: str, value: nodes.Expr, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(value, name, args or [], [], None, None, lineno=value.lineno)


def _reading(value: nodes.Expr) -> nodes.Expr:
    return value if isinstance(value, nodes.Const) else _filter(_READ, value)


def _refuse(node: nodes.Node) -> nodes.Node:
    raise TemplateError(f"line {node.lineno}: other templates cannot be used")
