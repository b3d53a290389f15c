//! `tests/data/tokenizer/cases.json` and the demo model: every recorded text, id and rendering, byte for byte.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;

fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(name)
}

fn model_text() -> TextModel {
    TextModel::open(&data("tokenizer"), 768).unwrap()
}

fn cases() -> Value {
    serde_json::from_slice(&std::fs::read(data("tokenizer/cases.json")).unwrap()).unwrap()
}

fn ids_of(case: &Value) -> Vec<u32> {
    serde_json::from_value(case["ids"].clone()).unwrap()
}

fn streamed(text: &TextModel, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut stream = text.stream(skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    pieces.push(stream.finish());
    pieces
}

/// An error about `path` (its file name) that says `what`.
fn assert_file_error(result: Result<TextModel, TextError>, path: &str, what: &str) {
    let error = result.err().expect("must be refused").to_string();
    assert!(error.contains(path) && error.contains(what), "{error}");
}

/// A copy of the tokenizer directory without its template.
fn copied_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(data("tokenizer").join(file), dir.path().join(file)).unwrap();
    }
    dir
}

#[test]
fn recorded_texts_encode_decode_and_stream_exactly() {
    let text = model_text();
    let cases = cases();
    let encode = cases["encode"].as_array().unwrap();
    assert!(encode.len() >= 43);
    for case in encode {
        let ids = ids_of(case);
        assert_eq!(text.encode(case["text"].as_str().unwrap()).unwrap(), ids, "{case}");
        assert_eq!(text.decode(&ids, false), case["decode"].as_str().unwrap());
        assert_eq!(text.decode(&ids, true), case["decode_skip_special"].as_str().unwrap());
        assert_eq!(json!(streamed(&text, &ids, false)), case["stream"], "{case}");
        assert_eq!(streamed(&text, &ids, true).concat(), text.decode(&ids, true));
    }
}

#[test]
fn odd_ids_decode_and_stream_exactly() {
    let text = model_text();
    for case in cases()["decode_odd"].as_array().unwrap() {
        let ids = ids_of(case);
        assert_eq!(text.decode(&ids, false), case["decode"].as_str().unwrap(), "{case}");
        // The recorded stream leaves out ids without text altogether; for us they are steps without text.
        let with_text: Vec<u32> = ids.iter().copied().filter(|&id| id < 736).collect();
        assert_eq!(json!(streamed(&text, &with_text, false)), case["stream"], "{case}");
        assert_eq!(streamed(&text, &ids, false).concat(), text.decode(&ids, false));
    }
    assert_eq!(text.decode(&[736, 767, 768, u32::MAX], false), "");
}

#[test]
fn any_ids_stream_to_what_they_decode_to() {
    let text = model_text();
    let mut state = 1_u64;
    for _ in 0..200 {
        let ids: Vec<u32> = (0..40)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Half of the ids are single bytes, so that characters are cut and broken often.
                let wide = state >> 40 & 1 == 1;
                (state >> 41) as u32 % if wide { 780 } else { 256 }
            })
            .collect();
        for skip_special in [false, true] {
            let pieces = streamed(&text, &ids, skip_special);
            assert_eq!(pieces.concat(), text.decode(&ids, skip_special), "{ids:?}");
        }
    }
}

#[test]
fn recorded_conversations_render_and_encode_exactly() {
    let own = model_text();
    // Without a template of its own, the directory gets the built-in one, which renders the same.
    let dir = copied_dir();
    let built_in = TextModel::open(dir.path(), 768).unwrap();
    let cases = cases();
    let chats = cases["chat"].as_array().unwrap();
    assert!(chats.len() >= 38);
    for case in chats {
        let chat = ChatInput {
            messages: case["messages"].as_array().unwrap().clone(),
            tools: case["tools"].as_array().cloned().unwrap_or_default(),
            kwargs: case["kwargs"].as_object().unwrap().clone(),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        };
        for text in [&own, &built_in] {
            let rendered = text.render_chat(&chat).unwrap();
            assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{}", case["name"]);
            assert_eq!(text.encode(&rendered).unwrap(), ids_of(case), "{}", case["name"]);
        }
    }
}

#[test]
fn argument_strings_render_like_argument_objects() {
    let text = model_text();
    let render = |arguments: Value| {
        let call = json!({"function": {"name": "f", "arguments": arguments}});
        let messages = vec![
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        ];
        text.render_chat(&ChatInput { messages, ..ChatInput::default() }).unwrap()
    };
    let rendered = render(json!({"city": "Łódź", "days": 2, "deep": {"b": 1, "a": [true]}}));
    assert_eq!(rendered, render(json!(r#"{"city": "Łódź", "days": 2, "deep": {"b": 1, "a": [true]}}"#)));
    assert!(
        rendered
            .ends_with("<arg_key>deep</arg_key><arg_value>{\"b\": 1, \"a\": [true]}</arg_value></tool_call>")
    );
    assert!(!rendered.contains("None"));
}

#[test]
fn thinking_is_found_by_rendering() {
    let text = model_text();
    assert!(text.thinking_default() && text.thinking_switchable());

    let dir = copied_dir();
    let template = dir.path().join("chat_template.jinja");
    std::fs::write(&template, "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}")
        .unwrap();
    let off = TextModel::open(dir.path(), 768).unwrap();
    assert!(!off.thinking_default() && off.thinking_switchable());

    std::fs::write(&template, "{{ messages[0].content }}<think>").unwrap();
    let always = TextModel::open(dir.path(), 768).unwrap();
    assert!(always.thinking_default() && !always.thinking_switchable());
}

#[test]
fn the_demo_model_speaks_its_own_template() {
    let text = TextModel::open(&data("demo-model"), 4096).unwrap();
    assert!(text.thinking_default() && text.thinking_switchable());
    assert_eq!(text.stop_ids(&[4075]), [4075, 4082, 4084]);
    assert_eq!(
        (text.default_temperature(), text.default_top_p(), text.default_top_k()),
        (Some(0.7), Some(0.95), None)
    );

    let prompts: Value =
        serde_json::from_slice(&std::fs::read(data("demo-model/expected/prompts.json")).unwrap()).unwrap();
    for (name, case) in prompts.as_object().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        assert_eq!(text.encode(case["prompt_text"].as_str().unwrap()).unwrap(), ids, "{name}");
        let greedy: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
        assert_eq!(text.decode(&greedy, false), case["greedy_text"].as_str().unwrap(), "{name}");
    }
    let chat = ChatInput {
        messages: vec![json!({"role": "user", "content": "Tell me a story about a fox."})],
        kwargs: json!({"enable_thinking": false}).as_object().unwrap().clone(),
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    assert_eq!(text.render_chat(&chat).unwrap(), prompts["chat"]["prompt_text"].as_str().unwrap());
}

#[test]
fn a_template_may_stand_in_the_tokenizer_config() {
    for template in [
        json!("T:{{ eos_token }}"),
        json!([{"name": "rag", "template": "no"}, {"name": "default", "template": "T:{{ eos_token }}"}]),
    ] {
        let dir = copied_dir();
        let config = json!({"chat_template": template, "eos_token": {"content": "<|end|>"}});
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let text = TextModel::open(dir.path(), 768).unwrap();
        assert_eq!(text.render_chat(&ChatInput::default()).unwrap(), "T:<|end|>");
        assert!(!text.thinking_default() && !text.thinking_switchable());
    }
}

#[test]
fn damaged_text_files_are_named() {
    let dir = copied_dir();
    let at = |file: &str| dir.path().join(file);
    let open = || TextModel::open(dir.path(), 768);
    open().unwrap();
    assert_file_error(TextModel::open(dir.path(), 735), "tokenizer.json", "another model");

    std::fs::write(at("tokenizer_config.json"), "{").unwrap();
    assert_file_error(open(), "tokenizer_config.json", "not a JSON object");
    std::fs::remove_file(at("tokenizer_config.json")).unwrap();
    open().unwrap();

    std::fs::write(at("chat_template.jinja"), "{% if %}").unwrap();
    assert_file_error(open(), "chat_template.jinja", "line 1");
    std::fs::write(at("chat_template.jinja"), [0xFF]).unwrap();
    assert_file_error(open(), "chat_template.jinja", "not UTF-8");
    std::fs::remove_file(at("chat_template.jinja")).unwrap();

    let whole = std::fs::read_to_string(at("tokenizer.json")).unwrap();
    std::fs::write(at("tokenizer.json"), &whole[..whole.len() / 2]).unwrap();
    assert_file_error(open(), "tokenizer.json", "not a valid tokenizer");
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_str(&whole).unwrap();
        change(&mut json);
        std::fs::write(at("tokenizer.json"), json.to_string()).unwrap();
        open()
    };
    let other_decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    assert_file_error(
        changed(&|json| json["decoder"] = other_decoder.clone()),
        "tokenizer.json",
        "byte-level",
    );
    assert_file_error(
        changed(&|json| json["added_tokens"][3]["id"] = json!(1703)),
        "tokenizer.json",
        "id 1703",
    );
    assert_file_error(changed(&|json| json["model"]["vocab"]["!"] = json!(-1)), "tokenizer.json", "-1");
    assert_file_error(
        changed(&|json| json["model"]["vocab"]["!"] = json!(u32::MAX)),
        "tokenizer.json",
        "another",
    );
    let no_vocabulary = |json: &mut Value| {
        json["model"]["vocab"] = json!({"!": 0});
        json["model"]["merges"] = json!([]);
        json["added_tokens"] = json!([]);
    };
    assert_file_error(changed(&no_vocabulary), "tokenizer.json", "single byte");
    std::fs::remove_file(at("tokenizer.json")).unwrap();
    assert_file_error(open(), "tokenizer.json", "missing");
}

#[test]
fn a_tokenizer_without_glm_tokens_has_no_template() {
    let dir = copied_dir();
    let path = dir.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json["added_tokens"] = json!([]);
    std::fs::write(&path, json.to_string()).unwrap();
    let text = TextModel::open(dir.path(), 768).unwrap();
    assert!(!text.has_chat_template());
    let error = text.render_chat(&ChatInput::default()).unwrap_err().to_string();
    assert!(error.contains("no chat template"), "{error}");
}
