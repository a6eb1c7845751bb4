"""`caramba chat RUN|DIR`: a conversation on a terminal, or line by line from a pipe."""

from __future__ import annotations

from caramba.console import logger
from caramba.infer.arguments import GenerationArguments, chat_template, open_generator, sampling_config
from caramba.infer.chat_session import ChatSession, converse, is_terminal, read_lines
from caramba.infer.dialogue import Dialogue
from caramba.infer.generator import Generator


def main(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a wrong argument or an unknown run; without a terminal also a message that cannot be taken.
    """
    parser = GenerationArguments("chat")
    parser.add_argument("--system")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume")
    args = parser.parse_args(argv)
    args.command = "chat"
    logger.quiet = args.quiet
    config = sampling_config(args)
    opened, generator = open_generator(args, config)
    assert generator.tokenizer is not None
    dialogue = Dialogue(generator.tokenizer, chat_template(opened, args), args.system)
    style = "the tokenizer's chat template" if dialogue.template is not None else "lines of User: and Assistant:"
    logger.info(f"{opened.path}: {style}, {generator.config.max_seq_len} tokens of context; /help for help")
    generator.keeps_seen = type(generator) is Generator
    session = ChatSession(generator, dialogue)
    if args.resume is not None:
        session.command(f"/load {args.resume}")
    converse(session, read_lines(), goes_on=is_terminal())
    return 0
