"""One command a file. This table imports nothing heavy; a command's module is imported when it runs."""

COMMANDS = {
    "ask": "longfocus.commands.ask:ask",
    "chat": "longfocus.commands.chat:chat",
    "remember": "longfocus.commands.remember:remember",
    "info": "longfocus.commands.info:info",
    "forget": "longfocus.commands.forget:forget",
    "compact": "longfocus.commands.compact:compact",
    "index": "longfocus.commands.index:index",
    "train": "longfocus.commands.train:train",
    "plan": "longfocus.commands.plan:plan",
    "calibrate-k": "longfocus.commands.calibrate_k:calibrate_k",
    "suggest-layers": "longfocus.commands.suggest_layers:suggest_layers",
    "eval": "longfocus.commands.eval:evaluate",
    "report": "longfocus.commands.report:report",
    "reproduce": "longfocus.commands.reproduce:reproduce",
    "lm-eval": "longfocus.commands.lm_eval:lm_eval",
}
