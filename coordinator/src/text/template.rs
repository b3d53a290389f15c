//! A checkpoint's chat template, rendered as transformers' Jinja sandbox would.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::Map;
use time::OffsetDateTime;

use super::TextError;
use super::python_json::Style;
use super::strftime::strftime;

/// Used for containers that bring no template but have GLM's tokens.
pub(super) const BUILT_IN_GLM: &str = include_str!("../../assets/glm_chat_template.jinja");

const NAME: &str = "chat template";

/// Instructions one rendering may take: far beyond any conversation that fits a context, some seconds of
/// work, so that a template with an endless loop cannot hold a server's thread for ever.
const MAX_STEPS: u64 = 50_000_000;

/// A compiled template.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token`, … of `tokenizer_config.json`.
    special_tokens: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles `source`; `origin` is named in errors.
    pub(super) fn compile(
        source: &str,
        origin: &Path,
        special_tokens: Map<String, serde_json::Value>,
    ) -> Result<Self, TextError> {
        let malformed = |error: Error| TextError::File {
            path: origin.to_owned(),
            what: format!("{}; mend the template", explain(&error)),
        };
        let mut environment = Environment::new();
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(malformed)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment
            .add_filter("tojson", |value: Value, kwargs: Kwargs| Style::from_kwargs(&kwargs)?.dumps(&value));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_function("strftime_now", |format: String| strftime(OffsetDateTime::now_utc(), &format));
        environment.add_template_owned(NAME, source.to_owned()).map_err(malformed)?;
        Ok(ChatTemplate { environment, special_tokens })
    }

    /// Renders with `variables`, which win over the special tokens.
    pub(super) fn render(&self, variables: Map<String, serde_json::Value>) -> Result<String, TextError> {
        let mut context = self.special_tokens.clone();
        context.extend(variables);
        let template =
            self.environment.get_template(NAME).map_err(|error| TextError::Template(explain(&error)))?;
        template
            .render(Value::from(minijinja::value::Serde(context)))
            .map_err(|error| TextError::Template(explain(&error)))
    }
}

fn explain(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (template line {line})"),
        None => what,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, variables: serde_json::Value) -> Result<String, TextError> {
        let special = json!({"bos_token": "<s>"}).as_object().unwrap().clone();
        let template = ChatTemplate::compile(source, Path::new("t.jinja"), special)?;
        template.render(variables.as_object().unwrap().clone())
    }

    #[test]
    fn renders_as_the_python_sandbox_does() {
        // Blocks swallow their line, methods are Python's, keys keep their order, nothing is escaped.
        let source = "{{ bos_token }}\n{% for k, v in x.items() %}\n  {% if v %}\n{{ k.upper() }}={{ v | tojson }}\n  {% endif %}\n{% endfor %}\nend";
        let text = render(source, json!({"x": {"b": {"<": [1, "é"]}, "a": 2, "c": ""}})).unwrap();
        assert_eq!(text, "<s>\nB={\"<\": [1, \"é\"]}\nA=2\nend");
    }

    #[test]
    fn a_template_may_refuse() {
        let error = render("{{ raise_exception('roles must alternate') }}", json!({})).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    #[test]
    fn a_template_that_does_not_end_is_stopped() {
        let source = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}";
        let error = render(source, json!({})).unwrap_err();
        assert!(error.to_string().contains("ran out of fuel"), "{error}");
    }

    #[test]
    fn a_malformed_template_names_file_and_line() {
        let error = render("ok\n{% for %}", json!({})).unwrap_err().to_string();
        assert!(error.contains("t.jinja") && error.contains("line 2"), "{error}");
    }

    #[test]
    fn the_date_is_available() {
        assert!(render("{{ strftime_now('%Y') }}", json!({})).unwrap().starts_with("20"));
        assert!(render("{{ strftime_now('%Q') }}", json!({})).is_err());
    }
}
