//! The conversation behind `chat` and `demo`: reads lines, keeps messages, shows answers.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use super::answer::{self, Answer, Limits, Printer, Prompt};
use super::error::CliError;
use super::http_client::Server;
use super::interrupt::Interrupt;
use super::output;
use super::sampling_args::{SamplingArgs, describe_thinking, on_off};
use crate::decode::EngineHandle;
use crate::text::{ReplyEvent, TextModel};

const HELP: &str = "\
/help            this list
/reset           forget the conversation
/system TEXT     set the system message (without TEXT: remove it)
/think on|off    let the model think before it answers (/think alone: back to the default)
/save FILE       write the conversation as JSON
/load FILE       continue a saved conversation
/stats           thinking, speed of the last answer
/quit, /exit     leave (or Ctrl-D)
A line that ends with \\ goes on in the next one; \"\"\" starts and ends a text of many lines.";

/// How a chat begins.
pub struct ChatSetup {
    /// Sampling of every answer.
    pub sampling: SamplingArgs,
    /// Limits of every answer.
    pub limits: Limits,
    /// Whether the model thinks; `None` = its default.
    pub think: Option<bool>,
    /// System message.
    pub system: Option<String>,
    /// File with typed lines of earlier chats.
    pub history: Option<PathBuf>,
}

enum Backend {
    Local { engine: EngineHandle, text: Arc<TextModel> },
    Remote(Server),
}

/// One conversation.
pub struct ChatSession {
    backend: Backend,
    setup: ChatSetup,
    interrupt: Interrupt,
    messages: Vec<Value>,
    answers: Vec<Answer>,
}

/// What a typed line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Say(String),
    Help,
    Reset,
    System(Option<String>),
    Think(Option<bool>),
    Save(PathBuf),
    Load(PathBuf),
    Stats,
    Quit,
    Wrong(String),
}

impl ChatSession {
    /// A chat with a model in this process. Its engine keeps the caches, so a turn processes only
    /// what is new.
    pub fn local(engine: EngineHandle, text: Arc<TextModel>, setup: ChatSetup, interrupt: Interrupt) -> Self {
        Self::new(Backend::Local { engine, text }, setup, interrupt)
    }

    /// A chat with a server.
    pub fn remote(server: Server, setup: ChatSetup, interrupt: Interrupt) -> Self {
        Self::new(Backend::Remote(server), setup, interrupt)
    }

    fn new(backend: Backend, setup: ChatSetup, interrupt: Interrupt) -> Self {
        Self { backend, setup, interrupt, messages: Vec::new(), answers: Vec::new() }
    }

    /// Answers of the local model so far.
    pub fn answers(&self) -> &[Answer] {
        &self.answers
    }

    /// Reads and answers until the end of input.
    ///
    /// # Errors
    /// [`CliError`] when the terminal fails; a failed answer is reported and the chat goes on.
    pub fn run(&mut self) -> Result<(), CliError> {
        let failed = |e: ReadlineError| CliError::Failed(format!("cannot read from the terminal: {e}"));
        let mut editor = DefaultEditor::new().map_err(failed)?;
        if let Some(path) = &self.setup.history {
            // The first chat has no history yet.
            let _ = editor.load_history(path);
        }
        if std::io::stdin().is_terminal() {
            output::note("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat");
        }
        output::note(&self.thinking());
        self.restore_terminal_on_kill();
        while let Some(text) = self.ask(&mut editor)? {
            if text.trim().is_empty() {
                continue;
            }
            // A history that cannot be kept is no reason to stop.
            let _ = editor.add_history_entry(text.as_str());
            match self.act(parse(&text)) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error @ (CliError::BrokenPipe | CliError::Interrupted)) => return Err(error),
                Err(error) => output::note(&format!("error: {error}")),
            }
        }
        if let Some(path) = &self.setup.history {
            let _ = editor.save_history(path);
        }
        Ok(())
    }

    /// The line editor puts the terminal into raw mode; a signal that ends the program puts it back.
    #[cfg(unix)]
    fn restore_terminal_on_kill(&self) {
        use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
        // Without a terminal there is nothing to restore.
        if let Ok(saved) = tcgetattr(std::io::stdin()) {
            self.interrupt.on_kill(move || {
                let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &saved);
            });
        }
    }

    #[cfg(not(unix))]
    fn restore_terminal_on_kill(&self) {}

    /// As [`ChatSession::read`]; a termination signal meanwhile ends the program.
    fn ask(&self, editor: &mut DefaultEditor) -> Result<Option<String>, CliError> {
        self.interrupt.at_prompt(true);
        let text = self.read(editor);
        self.interrupt.at_prompt(false);
        text
    }

    /// One typed text, possibly of several lines; `None` at the end.
    fn read(&self, editor: &mut DefaultEditor) -> Result<Option<String>, CliError> {
        let mut text = String::new();
        let mut block = false;
        loop {
            let prompt = if text.is_empty() && !block { "> " } else { "… " };
            let line = match editor.readline(prompt) {
                Ok(line) => line,
                // Ctrl-C throws the typed text away, as in a shell.
                Err(ReadlineError::Interrupted) => return Ok(Some(String::new())),
                Err(ReadlineError::Eof) if text.is_empty() => return Ok(None),
                Err(ReadlineError::Eof) => return Ok(Some(text)),
                Err(e) => return Err(CliError::Failed(format!("cannot read from the terminal: {e}"))),
            };
            if line.trim() == "\"\"\"" {
                if block {
                    return Ok(Some(text));
                }
                block = true;
            } else if block {
                text += &line;
                text.push('\n');
            } else if let Some(start) = line.strip_suffix('\\') {
                text += start;
                text.push('\n');
            } else {
                return Ok(Some(text + &line));
            }
        }
    }

    /// Does what a line asks for; false ends the chat.
    fn act(&mut self, line: Line) -> Result<bool, CliError> {
        match line {
            Line::Say(text) => self.say(&text)?,
            Line::Help => output::note(HELP),
            Line::Reset => {
                self.messages.clear();
                output::note("the conversation is forgotten");
            }
            Line::System(text) => {
                let note = if text.is_some() { "holds from the next answer on" } else { "is removed" };
                self.setup.system = text;
                output::note(&format!("the system message {note}"));
            }
            Line::Think(choice) => {
                self.setup.think = choice;
                output::note(&self.thinking());
            }
            Line::Save(path) => self.save(&path)?,
            Line::Load(path) => self.load(&path)?,
            Line::Stats => output::note(&self.stats()),
            Line::Quit => return Ok(false),
            Line::Wrong(what) => output::note(&what),
        }
        Ok(true)
    }

    fn say(&mut self, text: &str) -> Result<(), CliError> {
        self.interrupt.reset();
        self.messages.push(json!({ "role": "user", "content": text }));
        let system = self.setup.system.as_ref().map(|text| json!({ "role": "system", "content": text }));
        let messages: Vec<Value> = system.into_iter().chain(self.messages.iter().cloned()).collect();
        let mut printer = Printer::default();
        let answered = self.answer(messages, &mut |piece| printer.piece(piece));
        printer.end_thinking();
        match answered {
            Ok(message) => {
                output::emit("\n")?;
                if self.interrupt.requested() {
                    output::note("(stopped)");
                } else if let Some(cut) = self.answers.last().and_then(Answer::cut) {
                    output::note(&cut);
                }
                self.messages.push(message);
            }
            Err(error) => {
                // A question without an answer would confuse the next turn.
                self.messages.pop();
                return Err(error);
            }
        }
        self.interrupt.reset();
        Ok(())
    }

    fn answer(
        &mut self,
        messages: Vec<Value>,
        sink: &mut dyn FnMut(&ReplyEvent) -> Result<(), CliError>,
    ) -> Result<Value, CliError> {
        let setup = &self.setup;
        match &self.backend {
            Backend::Local { engine, text } => {
                let prompt = Prompt::chat(text, messages, setup.think)?;
                let request = answer::request(text, &prompt, &setup.sampling, &setup.limits)?;
                let answer = answer::ask(engine, &prompt, request, &self.interrupt, sink)?;
                let message = json!({
                    "role": "assistant",
                    "content": answer.content,
                    "reasoning_content": answer.reasoning,
                });
                self.answers.push(answer);
                Ok(message)
            }
            Backend::Remote(server) => server.chat(&messages, setup, &self.interrupt, sink),
        }
    }

    fn save(&self, path: &Path) -> Result<(), CliError> {
        let document = json!({ "system": self.setup.system, "messages": self.messages });
        std::fs::write(path, format!("{document:#}\n"))
            .map_err(|e| CliError::io(format!("cannot save {}", path.display()), &e))?;
        output::note(&format!("saved {} messages to {}", self.messages.len(), path.display()));
        Ok(())
    }

    fn load(&mut self, path: &Path) -> Result<(), CliError> {
        let bytes =
            std::fs::read(path).map_err(|e| CliError::io(format!("cannot load {}", path.display()), &e))?;
        let document: Value = serde_json::from_slice(&bytes)
            .map_err(|e| CliError::Failed(format!("{} is not a saved conversation: {e}", path.display())))?;
        let Some(messages) = document["messages"].as_array().filter(|list| list.iter().all(Value::is_object))
        else {
            return Err(CliError::Failed(format!(
                "{} is not a saved conversation: no messages",
                path.display()
            )));
        };
        self.messages = messages.clone();
        self.setup.system = document["system"].as_str().map(str::to_owned);
        output::note(&format!("loaded {} messages", self.messages.len()));
        Ok(())
    }

    /// Whether the model thinks, and who said so.
    fn thinking(&self) -> String {
        match &self.backend {
            Backend::Local { text, .. } => describe_thinking(text, self.setup.think),
            Backend::Remote(_) => match self.setup.think {
                Some(on) => format!("thinking: {}", on_off(on)),
                None => "thinking: the server's default (its status page shows it)".to_owned(),
            },
        }
    }

    fn stats(&self) -> String {
        format!("{}\n{}", self.thinking(), self.speed())
    }

    fn speed(&self) -> String {
        match (&self.backend, self.answers.last()) {
            (Backend::Remote(_), _) => "the server's status page shows its speed".to_owned(),
            (_, None) => "no answer yet".to_owned(),
            (_, Some(answer)) => {
                let stats = &answer.generation.stats;
                format!(
                    "{} prompt tokens ({} reused), {} generated at {:.1} tokens/s, first after {:.2} s, drafts {}/{} accepted",
                    stats.prompt_tokens,
                    stats.reused_tokens,
                    stats.generated_tokens,
                    answer.tokens_per_s(),
                    answer.first_token_s,
                    stats.accepted,
                    stats.drafted
                )
            }
        }
    }
}

fn parse(text: &str) -> Line {
    let Some(command) = text.strip_prefix('/') else { return Line::Say(text.to_owned()) };
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    let file = |make: fn(PathBuf) -> Line| {
        if rest.is_empty() { Line::Wrong(format!("/{name} needs a file name")) } else { make(rest.into()) }
    };
    match (name, rest) {
        ("help", _) => Line::Help,
        ("reset", _) => Line::Reset,
        ("system", "") => Line::System(None),
        ("system", text) => Line::System(Some(text.to_owned())),
        ("think", "") => Line::Think(None),
        ("think", "on") => Line::Think(Some(true)),
        ("think", "off") => Line::Think(Some(false)),
        ("think", _) => Line::Wrong("write /think on, /think off or /think".to_owned()),
        ("save", _) => file(Line::Save),
        ("load", _) => file(Line::Load),
        ("stats", _) => Line::Stats,
        ("quit" | "exit", _) => Line::Quit,
        _ => Line::Wrong(format!("/{name} is not a command; /help lists them")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_text_or_commands() {
        assert_eq!(parse("hello"), Line::Say("hello".into()));
        assert_eq!(parse("/think off"), Line::Think(Some(false)));
        assert_eq!(parse("/system  be short "), Line::System(Some("be short".into())));
        assert_eq!(parse("/save my chat.json"), Line::Save("my chat.json".into()));
        assert!(matches!(parse("/load"), Line::Wrong(_)));
        assert!(matches!(parse("/nonsense"), Line::Wrong(_)));
    }
}
