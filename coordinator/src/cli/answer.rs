//! One question to the engine and its answer as it arrives: shared by `run`, `chat` and `demo`.

use std::time::Instant;

use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use super::error::CliError;
use super::interrupt::Interrupt;
use super::open::Served;
use super::output;
use super::sampling_args::SamplingArgs;
use crate::decode::{
    DraftPolicy, EngineHandle, Event, FinishReason, GenerateRequest, Generation, JobEvent, JobReceiver,
};
use crate::text::{ChatInput, ReplyEvent, ReplyParser, TextModel, ToolCall, prompt_opens_thinking};

/// A prompt ready for the engine.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether the answer is text as it comes, without reasoning and tool calls.
    pub raw: bool,
    /// Whether the prompt opened a think block.
    pub in_thinking: bool,
    /// Tools the answer may call.
    pub tools: Vec<Value>,
}

impl Prompt {
    /// Text continued as it stands.
    ///
    /// # Errors
    /// [`CliError::Failed`] when the text cannot be tokenized.
    pub fn raw(text: &TextModel, prompt: &str) -> Result<Self, CliError> {
        Ok(Self { ids: text.encode(prompt)?, raw: true, in_thinking: false, tools: Vec::new() })
    }

    /// A conversation rendered by the model's template, the assistant's turn opened.
    ///
    /// # Errors
    /// [`CliError::Failed`] when the template refuses it.
    pub fn chat(text: &TextModel, messages: Vec<Value>, think: Option<bool>) -> Result<Self, CliError> {
        let mut kwargs = Map::new();
        if let Some(think) = think {
            kwargs.insert("enable_thinking".into(), think.into());
        }
        let input = ChatInput { messages, tools: Vec::new(), kwargs, add_generation_prompt: true };
        let rendered = text.render_chat(&input)?;
        let ids = text.encode(&rendered)?;
        Ok(Self { ids, raw: false, in_thinking: prompt_opens_thinking(&rendered), tools: Vec::new() })
    }
}

/// Limits of an answer that do not depend on the prompt.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest conversation in tokens.
    pub context_tokens: usize,
    /// Stop ids of the model.
    pub stop_ids: Vec<u32>,
    /// Drafting.
    pub drafts: DraftPolicy,
    /// Rows per prefill step.
    pub prefill_chunk: usize,
}

/// Makes the engine's request from a prompt and the flags.
///
/// # Errors
/// [`CliError::Usage`] when the prompt does not fit or a parameter is out of range.
pub fn request(
    text: &TextModel,
    prompt: &Prompt,
    sampling: &SamplingArgs,
    limits: &Limits,
) -> Result<GenerateRequest, CliError> {
    if prompt.ids.is_empty() {
        return Err(CliError::Usage("the prompt is empty; give some text".into()));
    }
    let room = limits.context_tokens.saturating_sub(prompt.ids.len());
    if room == 0 {
        return Err(CliError::Usage(format!(
            "the prompt has {} tokens and the context {}; raise --context or shorten the prompt",
            prompt.ids.len(),
            limits.context_tokens
        )));
    }
    Ok(GenerateRequest {
        prompt: prompt.ids.clone(),
        sampling: sampling.params(text)?,
        max_tokens: sampling.max_tokens.unwrap_or(room).min(room),
        stop_ids: limits.stop_ids.clone(),
        stop_strings: sampling.stop.clone(),
        drafts: limits.drafts,
        prefill_chunk: limits.prefill_chunk,
    })
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What the engine reports.
    pub generation: Generation,
    /// The answer without reasoning and calls (with `raw`: everything).
    pub content: String,
    /// The reasoning.
    pub reasoning: String,
    /// Complete tool calls.
    pub tool_calls: Vec<ToolCall>,
    /// Seconds from the request to the first token.
    pub first_token_s: f64,
}

/// Asks the engine and hands each certain piece to `sink`; Ctrl-C ends the answer early.
///
/// # Errors
/// The engine's or the sink's; the job is cancelled.
pub fn ask(
    engine: &EngineHandle,
    prompt: &Prompt,
    request: GenerateRequest,
    interrupt: &Interrupt,
    sink: &mut dyn FnMut(&ReplyEvent) -> Result<(), CliError>,
) -> Result<Answer, CliError> {
    let started = Instant::now();
    let prompt_tokens = request.prompt.len();
    let job = engine.submit(request).map_err(|e| CliError::Failed(e.to_string()))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|e| CliError::Failed(format!("cannot wait for the engine: {e}")))?;
    let mut reader = Reader {
        parser: (!prompt.raw).then(|| ReplyParser::new(prompt.in_thinking, &prompt.tools)),
        content: String::new(),
        reasoning: String::new(),
        tool_calls: Vec::new(),
        first_token_s: None,
        started,
        bar: output::count_bar("prefill", prompt_tokens as u64),
        sink,
    };
    let generation = runtime.block_on(reader.run(job, interrupt));
    reader.bar.finish_and_clear();
    let generation = generation?;
    Ok(Answer {
        first_token_s: reader.first_token_s.unwrap_or_else(|| started.elapsed().as_secs_f64()),
        content: reader.content,
        reasoning: reader.reasoning,
        tool_calls: reader.tool_calls,
        generation,
    })
}

struct Reader<'a> {
    parser: Option<ReplyParser>,
    content: String,
    reasoning: String,
    tool_calls: Vec<ToolCall>,
    first_token_s: Option<f64>,
    started: Instant,
    bar: ProgressBar,
    sink: &'a mut dyn FnMut(&ReplyEvent) -> Result<(), CliError>,
}

impl Reader<'_> {
    async fn run(&mut self, mut job: JobReceiver, interrupt: &Interrupt) -> Result<Generation, CliError> {
        let cancel = job.cancel_handle();
        let mut cancelled = false;
        loop {
            let event = tokio::select! {
                event = job.recv() => event,
                () = interrupt.wait(), if !cancelled => {
                    cancelled = true;
                    cancel.cancel();
                    continue;
                }
            };
            match event {
                Some(JobEvent::Event(event)) => self.event(event)?,
                Some(JobEvent::Done(result)) => {
                    let generation = result?;
                    if let Some(mut parser) = self.parser.take() {
                        self.pieces(parser.finish())?;
                    }
                    return Ok(generation);
                }
                None => {
                    return Err(CliError::Failed("the engine stopped before the answer was complete".into()));
                }
            }
        }
    }

    fn event(&mut self, event: Event) -> Result<(), CliError> {
        match event {
            Event::Prefill { done, .. } => self.bar.set_position(done as u64),
            Event::Token { text, .. } => {
                if self.first_token_s.is_none() {
                    self.first_token_s = Some(self.started.elapsed().as_secs_f64());
                    self.bar.finish_and_clear();
                }
                self.text(text)?;
            }
            Event::Tail { text } => self.text(text)?,
        }
        Ok(())
    }

    fn text(&mut self, text: String) -> Result<(), CliError> {
        if text.is_empty() {
            return Ok(());
        }
        let pieces = match &mut self.parser {
            Some(parser) => parser.push(&text),
            None => vec![ReplyEvent::Content(text)],
        };
        self.pieces(pieces)
    }

    fn pieces(&mut self, pieces: Vec<ReplyEvent>) -> Result<(), CliError> {
        for piece in pieces {
            match &piece {
                ReplyEvent::Reasoning(text) => self.reasoning.push_str(text),
                // A call that is not one is text the model wrote: never dropped.
                ReplyEvent::Content(text) | ReplyEvent::BrokenToolCall(text) => self.content.push_str(text),
                ReplyEvent::ToolCall(call) => self.tool_calls.push(call.clone()),
            }
            (self.sink)(&piece)?;
        }
        Ok(())
    }
}

/// Prints an answer as it arrives: the answer on stdout, reasoning and calls on stderr (dim on a
/// terminal), so that a pipe gets the answer alone and a person sees everything.
#[derive(Default)]
pub struct Printer {
    thinking: bool,
}

impl Printer {
    /// Prints one piece.
    ///
    /// # Errors
    /// [`CliError::BrokenPipe`].
    pub fn piece(&mut self, piece: &ReplyEvent) -> Result<(), CliError> {
        let terminal = output::stderr_is_terminal();
        match piece {
            ReplyEvent::Reasoning(text) => {
                if !self.thinking {
                    output::note_raw(&output::dim("[thinking] ", terminal));
                }
                self.thinking = true;
                output::note_raw(&output::dim(text, terminal));
            }
            ReplyEvent::Content(text) | ReplyEvent::BrokenToolCall(text) => {
                self.end_thinking();
                output::emit(text)?;
            }
            ReplyEvent::ToolCall(call) => {
                self.end_thinking();
                output::emit(&format!("{}\n", call_text(call)))?;
            }
        }
        Ok(())
    }

    /// Ends a line of reasoning that no answer followed.
    pub fn end_thinking(&mut self) {
        if std::mem::take(&mut self.thinking) {
            output::note("");
        }
    }
}

/// A call as people read it: `name({"key": value})`.
pub fn call_text(call: &ToolCall) -> String {
    format!("{}({})", call.name, Value::Object(call.arguments.clone()))
}

impl Answer {
    /// `stop`, `length`, `tool_calls` or `cancelled`.
    pub fn finish_reason(&self) -> &'static str {
        match self.generation.finish {
            FinishReason::Cancelled => "cancelled",
            FinishReason::Length => "length",
            _ if !self.tool_calls.is_empty() => "tool_calls",
            FinishReason::StopId(_) | FinishReason::StopString(_) => "stop",
        }
    }

    /// What to tell a person when the answer ended for want of room.
    pub fn cut(&self) -> Option<String> {
        (self.generation.finish == FinishReason::Length).then(|| {
            let tokens = self.generation.stats.generated_tokens;
            format!("(cut off after {tokens} tokens; a larger --max-tokens or --context lets it go on)")
        })
    }

    /// Generated tokens per second of decoding.
    pub fn tokens_per_s(&self) -> f64 {
        let stats = &self.generation.stats;
        if stats.decode_s > 0.0 { stats.generated_tokens as f64 / stats.decode_s } else { 0.0 }
    }

    /// The answer as one JSON document.
    pub fn to_json(&self, seed: u64, load_s: f64, served: &Served) -> Value {
        let stats = &self.generation.stats;
        let stop = match &self.generation.finish {
            FinishReason::StopId(id) => json!({ "id": id }),
            FinishReason::StopString(text) => json!({ "text": text }),
            _ => Value::Null,
        };
        let calls: Vec<Value> =
            self.tool_calls.iter().map(|c| json!({ "name": c.name, "arguments": c.arguments })).collect();
        json!({
            "text": self.content,
            "reasoning": self.reasoning,
            "tool_calls": calls,
            "ids": self.generation.ids,
            "finish_reason": self.finish_reason(),
            "stop": stop,
            "seed": seed,
            "usage": {
                "prompt_tokens": stats.prompt_tokens,
                "cached_tokens": stats.reused_tokens,
                "completion_tokens": stats.generated_tokens,
                "total_tokens": stats.prompt_tokens + stats.generated_tokens,
            },
            "drafts": {
                "rounds": stats.rounds,
                "proposed": stats.drafted,
                "accepted": stats.accepted,
                "choice": stats.drafting,
            },
            "timings": {
                "load_s": load_s,
                "prefill_s": stats.prefill_s,
                "first_token_s": self.first_token_s,
                "decode_s": stats.decode_s,
                "tokens_per_s": self.tokens_per_s(),
            },
            "time": stats.time,
            "experts": served,
        })
    }
}
